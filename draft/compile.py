import sys; sys.path.insert(0,'/tmp/plan/tri')
import triton, torch
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
import fused_rivals as f
for cap in (80,90):
  for BB,BC,w,st in ((64,32,8,2),(64,32,8,3),(64,64,8,2),(32,64,4,2),(64,32,4,2)):
    src=ASTSource(fn=f._kernel, signature={'x':'*bf16','centre':'*bf16','label':'*i64','most':'*fp32','total':'*fp32','mean':'*fp32','B':'i32','C':'i32','share':'i32','D':'constexpr','BB':'constexpr','BC':'constexpr'}, constexprs={'D':512,'BB':BB,'BC':BC})
    try:
        k=triton.compile(src,target=GPUTarget('cuda',cap,32),options={'num_warps':w,'num_stages':st})
        import subprocess,tempfile
        with tempfile.NamedTemporaryFile(suffix='.ptx',delete=False) as t: t.write(k.asm['ptx'].encode())
        from triton.backends.nvidia.compiler import get_ptxas
        px=get_ptxas(cap); px=px[0] if isinstance(px,tuple) else getattr(px,'path',px)
        arch='sm_90a' if cap==90 else f'sm_{cap}'
        o=subprocess.run([str(px),'-v','--gpu-name',arch,t.name,'-o','/dev/null'],capture_output=True,text=True).stderr
        print(cap,BB,BC,w,st,'shared',k.metadata.shared,[l for l in o.splitlines() if 'registers' in l or 'spill' in l][-2:])
    except Exception as e: print(cap,BB,BC,w,st,type(e).__name__,str(e)[:200])
