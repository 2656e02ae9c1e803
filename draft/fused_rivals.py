import torch, triton
import triton.language as tl

NONE = -1.0e30


@triton.jit
def _kernel(x, centre, label, most, total, mean, B, C, share,
            D: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr):
    part = tl.program_id(1)
    rows = tl.program_id(0) * BB + tl.arange(0, BB)
    dims = tl.arange(0, D)
    here = rows < B
    q = tl.load(x + rows[:, None] * D + dims[None, :], mask=here[:, None], other=0.0)
    own = tl.load(label + rows, mask=here, other=-1)
    m = tl.full([BB], -1.0e30, tl.float32)
    l = tl.zeros([BB], tl.float32)
    acc = tl.zeros([BB, D], tl.float32)
    first = part * share
    last = tl.minimum(first + share, C)
    for start in range(first, last, BC):
        classes = start + tl.arange(0, BC)
        k = tl.load(centre + classes[:, None].to(tl.int64) * D + dims[None, :], mask=(classes < last)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k))
        rival = (classes < last)[None, :] & (classes[None, :] != own[:, None])
        s = tl.where(rival, s, -1.0e30)
        more = tl.maximum(m, tl.max(s, 1))
        fade = tl.exp2(m - more)
        p = tl.where(rival, tl.exp2(s - more[:, None]), 0.0)
        l = l * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(k.dtype), k)
        m = more
    at = part * B + rows
    tl.store(most + at, m, mask=here)
    tl.store(total + at, l, mask=here)
    tl.store(mean + at[:, None].to(tl.int64) * D + dims[None, :], acc, mask=here[:, None])


def summed(x_BD, centre_CD, label_B, parts=16, BB=64, BC=32, warps=8, stages=2):
    """x times scale times log2(e), same dtype as centres. Returns most (ln), sum relative to it, mean (unnormalised)."""
    B, D = x_BD.shape
    C = len(centre_CD)
    share = triton.cdiv(triton.cdiv(C, parts), BC) * BC
    parts = triton.cdiv(C, share)
    most = torch.empty(parts, B, device=x_BD.device)
    total = torch.empty_like(most)
    mean = torch.empty(parts, B, D, device=x_BD.device)
    _kernel[(triton.cdiv(B, BB), parts)](x_BD, centre_CD, label_B, most, total, mean, B, C, share,
                                         D=D, BB=BB, BC=BC, num_warps=warps, num_stages=stages)
    top = most.amax(0)
    weight = torch.exp2(most - top)
    return top, (total * weight).sum(0), torch.einsum("pb,pbd->bd", weight, mean)
