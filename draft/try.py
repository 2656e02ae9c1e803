import os, sys
os.environ['TRITON_INTERPRET']='1'
sys.path.insert(0,'/tmp/plan/tri')
import torch, math
from fused_rivals import summed
torch.manual_seed(0)
for B,C,D,dt in ((5,97,64,torch.float32),(70,300,128,torch.float32),(33,257,64,torch.bfloat16)):
    x=torch.nn.functional.normalize(torch.randn(B,D)); c=torch.nn.functional.normalize(torch.randn(C,D)); y=torch.randint(0,C,(B,))
    s=64.
    xs=(x*s*math.log2(math.e)).to(dt); cc=c.to(dt)
    top,tot,mean=summed(xs,cc,y,parts=4,BB=16,BC=16)
    logit=(xs.double()@cc.double().T)*math.log(2); logit[torch.arange(B),y]=-torch.inf
    ref=logit.logsumexp(1); got=(tot.double().log()+top.double()*math.log(2))
    refm=logit.softmax(1)@cc.double(); gotm=(mean/tot[:,None]).double()
    print(B,C,D,dt,(ref-got).abs().max().item(), ((refm-gotm).norm()/refm.norm()).item())
