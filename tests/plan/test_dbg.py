from pathlib import Path
import pytest, torch
from pool import ranks
from runs import *
@ranks(2)
def test_x(rank, tmp_path: Path) -> None:
    import warnings; warnings.simplefilter("ignore")
    with open_tiny(tmp_path, pool_ranks(), "precision.compute=bf16", "precision.weights=bf16", "train.steps=1", "optim.warmup=1 steps", "parallel.tp=2") as run:
        shard = run.shard
        def s(m):
            out = shard(m)
            for n, mod in out.named_modules():
                mod.register_forward_hook(lambda mo, i, o, n=n: print(n, [getattr(x,'dtype',None) for x in i], getattr(o,'dtype',None)))
            print({n: p.dtype for n,p in out.named_parameters()})
            return out
        run.shard = s
        train_run(run)
    assert rank
