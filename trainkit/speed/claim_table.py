"""The claims of five guides to faster training: a record for each statement about speed or memory.

`claims` measures them, and writes `docs/claims.md` from this.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass

from trainkit.speed.claim_measurements import REVISION, Cannot, Inside, Shown, Switch, Way, Whole


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a guide."""

    id: str
    guide: str
    """Of `GUIDES`."""
    said: str
    """The statement, translated and shortened."""
    promised: str = "faster"
    """The number as the guide has it."""
    least: float = 1.0
    """The ratio that this means at least; 1: better at all."""
    most: float | None = None
    """The ratio that it means at most."""
    how: str
    """How it is measured."""
    way: Way

    @property
    def digest(self) -> str:
        """Of what decides the figure: a claim that is measured otherwise is measured again."""
        return hashlib.sha256(repr((REVISION, self.guide, self.least, self.most, self.way)).encode()).hexdigest()[:16]


_IN_TURNS = "two trainings in turns, A B B A"
_HALF = "about 50 %, taken as 40 to 60 %"
_HALF_OF = {"promised": _HALF, "least": 1 / 0.6, "most": 1 / 0.4}
_FP16 = {"before": ("train.precision=no", "device.tf32=false"), "after": ("train.precision=fp16", "device.tf32=false")}
_CONVNEXT = "task.net={name: eye_convnext, base_channels: 64, num_blocks: 4, head: avg}"
_BASELINE = "task.net={name: eye_baseline, base_channels: 64, num_blocks: 4, head: avg}"
_PIN = {"before": ("loader.pin=false",), "after": ("loader.pin=true",), "gpu": True}
_WORKERS = {"before": ("loader.workers=0", "loader.pin=false"), "after": ("loader.workers={cores}", "loader.pin=true")}
_GRAPHS = {
    "before": ("train.compile=off",),
    "after": ("train.compile=reduce-overhead",),
    "gpu": True,
    "compiles": True,
}
_UTILISATION = Cannot(
    why="utilisation is the share of time in which any kernel ran, which small kernels fill as well as large ones, and "
    "no speed is promised; every run's verdict compares with what loader and network reach alone"
)


def _batch(size: int) -> tuple[str, ...]:
    return (f"train.batch_size={size}", f"train.micro_batch={size}")


_FACES = (
    Claim(
        id="faces-callbacks",
        guide="faces",
        said="Evaluation callbacks that are called at every step and go back at once made training fall from 930 to "
        "170-210 samples/s",
        promised="4-5x",
        least=4,
        most=5,
        how="three such callbacks timed, against an update. The public log of that run has its slow lines where an "
        "evaluation lies in the window of the meter",
        way=Inside(function="callbacks_that_return"),
    ),
    Claim(
        id="faces-modes",
        guide="faces",
        said="Such calls may switch the network between eval and train mode, which adds up",
        how="eval() and train() of the recipe's network at every update, timed, against an update",
        way=Inside(function="switching_modes"),
    ),
    Claim(
        id="faces-validation",
        guide="faces",
        said="Validating every 2 epochs instead of every epoch makes a long training faster",
        how="seconds of an update and of an evaluation, measured; 26 epochs, computed from them",
        way=Whole(evaluation="", every=("1 epoch", "2 epochs"), length="26 epochs"),
    ),
    Claim(
        id="faces-workers",
        guide="faces",
        said="num_workers=8 is reasonable, to be adjusted to the number of cores",
        how=f"{_IN_TURNS}: no workers, and as many as there are cores",
        way=Switch(**_WORKERS),
    ),
    Claim(
        id="faces-amp",
        guide="faces",
        said="The program uses mixed precision already",
        promised="no number",
        how="a statement about a program",
        way=Cannot(why="it speaks of a program and not of speed; the public source trains in float32"),
    ),
)

_EYES = (
    Claim(
        id="eyes-amp",
        guide="eyes",
        said="Mixed precision (fp16) makes the ConvNeXt's epochs 15-20 minutes instead of 30",
        promised="1.5-2x",
        least=1.5,
        most=2,
        how=f"{_IN_TURNS}: float32 and fp16, ConvNeXt of 64 channels and 4 blocks, batches of 1024",
        way=Switch(both=(_CONVNEXT, *_batch(1024)), gpu=True, **_FP16),
    ),
    Claim(
        id="eyes-amp-memory",
        guide="eyes",
        said="Mixed precision halves the memory",
        how="the same trainings: most memory that the allocator gave away",
        way=Switch(both=(_CONVNEXT, *_batch(1024)), gpu=True, of="memory", **_FP16),
        **_HALF_OF,
    ),
    Claim(
        id="eyes-amp-baseline",
        guide="eyes",
        said="Mixed precision makes the baseline's epochs 5-10 minutes instead of 10-15",
        promised="1.5-2x",
        least=1.5,
        most=2,
        how=f"{_IN_TURNS}: float32 and fp16, baseline of 64 channels and 4 blocks, batches of 1024",
        way=Switch(both=(_BASELINE, *_batch(1024)), gpu=True, **_FP16),
    ),
    Claim(
        id="eyes-baseline",
        guide="eyes",
        said="The baseline's epochs take 10-15 minutes where the ConvNeXt's take 30",
        promised="2-3x",
        least=2,
        most=3,
        how=f"{_IN_TURNS}: ConvNeXt and baseline, each of 64 channels and 4 blocks, float32",
        way=Switch(before=(_CONVNEXT,), after=(_BASELINE,), both=("train.precision=no",)),
    ),
    Claim(
        id="eyes-channels",
        guide="eyes",
        said="48 base channels instead of 64",
        how=f"{_IN_TURNS}, of the ConvNeXt",
        way=Switch(before=(_CONVNEXT,), after=(_CONVNEXT.replace("64", "48"),)),
    ),
    Claim(
        id="eyes-blocks",
        guide="eyes",
        said="3 blocks instead of 4",
        how=f"{_IN_TURNS}, of the ConvNeXt",
        way=Switch(before=(_CONVNEXT,), after=(_CONVNEXT.replace("num_blocks: 4", "num_blocks: 3"),)),
    ),
    Claim(
        id="eyes-pin",
        guide="eyes",
        said="pin_memory makes the copy to the GPU faster",
        how=_IN_TURNS,
        way=Switch(both=_batch(1024), **_PIN),
    ),
    Claim(
        id="eyes-persistent",
        guide="eyes",
        said="persistent_workers spares starting workers anew at every epoch",
        how="an epoch of one batch a worker with and without, timed, against an epoch of the recipe; here workers live "
        "as long as the run",
        way=Inside(function="workers_that_stay", seconds=12),
    ),
    Claim(
        id="eyes-prefetch",
        guide="eyes",
        said="prefetch_factor=8",
        how=f"{_IN_TURNS}: 2 and 8 batches ahead, as many workers as cores",
        way=Switch(before=("loader.prefetch=2",), after=("loader.prefetch=8",), both=("loader.workers={cores}",)),
    ),
    Claim(
        id="eyes-workers",
        guide="eyes",
        said="24 workers instead of 16, if the CPU has room",
        how=_IN_TURNS,
        way=Switch(before=("loader.workers=16",), after=("loader.workers=24",), cores=16),
    ),
    Claim(
        id="eyes-metrics",
        guide="eyes",
        said="Separation measured every 20 epochs instead of every 10",
        how="seconds of an update and of that evaluation, measured; 200 epochs, computed from them",
        way=Whole(evaluation="separation", every=("10 epochs", "20 epochs"), length="200 epochs"),
    ),
    Claim(
        id="eyes-pictures",
        guide="eyes",
        said="Embeddings and pictures kept every 100 epochs instead of every 50",
        how="seconds of an update and of that evaluation, measured; 200 epochs, computed from them",
        way=Whole(evaluation="pictures", every=("50 epochs", "100 epochs"), length="200 epochs"),
    ),
    Claim(
        id="eyes-effective-batch",
        guide="eyes",
        said="With 2 GPUs under DataParallel a batch of 1024 is an effective batch of 2048",
        promised="2048",
        how="computed",
        way=Shown(function="two_gpus"),
    ),
    Claim(
        id="eyes-batch",
        guide="eyes",
        said="A batch of 1536 instead of 1024 uses the GPU better",
        how=f"{_IN_TURNS}: samples/s",
        way=Switch(before=_batch(1024), after=_batch(1536), both=(_CONVNEXT,), gpu=True),
    ),
    Claim(
        id="eyes-lr",
        guide="eyes",
        said="A larger batch needs its learning rate in proportion",
        promised="no number",
        how="a statement about learning",
        way=Cannot(why="it speaks of what is learned and not of speed; `optim.lr_rule` offers it, linear or by root"),
    ),
    Claim(
        id="eyes-compile",
        guide="eyes",
        said="torch.compile(mode='reduce-overhead') makes what follows the first updates faster",
        how=f"{_IN_TURNS}, compiling left out; the mode is CUDA graphs, which a CPU has not",
        way=Switch(both=(_CONVNEXT,), **_GRAPHS),
    ),
    Claim(
        id="eyes-ddp",
        guide="eyes",
        said="DistributedDataParallel is faster than DataParallel",
        how="it takes two GPUs",
        way=Cannot(why="trainkit has no DataParallel to compare with, and it takes two GPUs"),
    ),
    Claim(
        id="eyes-utilisation",
        guide="eyes",
        said="Below 80 % GPU utilisation the loader is the bottleneck, above 95 % the network",
        promised="80 %, 95 %",
        how="a rule of thumb",
        way=_UTILISATION,
    ),
)

_PEOPLE = (
    Claim(
        id="people-sampler",
        guide="people",
        said="Modalities cached once instead of inferred for every sample of every batch: sampling gets faster",
        promised="3-5x",
        least=3,
        most=5,
        how="a batch chosen by reading each of its records to see what it is, and drawn by the sampler's index",
        way=Inside(function="sampler_alone"),
    ),
    Claim(
        id="people-sampler-training",
        guide="people",
        said="The same, as the greatest gain of the training",
        promised="3-5x",
        least=3,
        most=5,
        how="the two costs of a batch against an update",
        way=Inside(function="sampler_in_training"),
    ),
    Claim(
        id="people-index",
        guide="people",
        said="Caching 14,910 records takes 2-3 s, less than 5",
        promised="5 s at most",
        least=1,
        how="the sampler's index of as many records of 320 people, timed",
        way=Inside(function="index_seconds", recipe=False, seconds=2),
    ),
    Claim(
        id="people-calls",
        guide="people",
        said="1863 batches of 32 samples are 59,616 calls an epoch",
        promised="59,616",
        how="computed",
        way=Shown(function="samples_of_an_epoch"),
    ),
    Claim(
        id="people-logging",
        guide="people",
        said="Figures printed every 100 and 200 batches instead of at every batch",
        promised="2x",
        least=2,
        how="a printed line of six norms of the features at every update and at every hundredth, against an update",
        way=Inside(function="debug_lines"),
    ),
    Claim(
        id="people-log-line",
        guide="people",
        said="The same of this product's own log: a line every 100 updates instead of every one",
        promised="2x",
        least=2,
        how=_IN_TURNS,
        way=Switch(before=("log.every=1 step",), after=("log.every=100 steps",)),
    ),
    Claim(
        id="people-log-lines",
        guide="people",
        said="From every 50 to every 100 and 200: 50-75 % less writing",
        promised="50-75 %",
        how="lines counted",
        way=Shown(function="half_to_three_quarters"),
    ),
    Claim(
        id="people-norms",
        guide="people",
        said="The gradient's norm every 200 steps instead of every step",
        promised="1.5x",
        least=1.5,
        how="the norm read parameter by parameter before clipping, at every update and at every 200th, against an "
        "update; what clips computes it all the same",
        way=Inside(function="gradient_norms"),
    ),
    Claim(
        id="people-pin",
        guide="people",
        said="pin_memory and non_blocking copies",
        promised="1.3x",
        least=1.3,
        how=f"{_IN_TURNS}: without and with page-locked memory, copies never waited for",
        way=Switch(**_PIN),
    ),
    Claim(
        id="people-workers",
        guide="people",
        said="On Windows 2 workers are faster than 4",
        promised="1.2x",
        least=1.2,
        how=f"{_IN_TURNS}; workers started by `spawn`, as Windows does",
        way=Switch(
            before=("loader.workers=4",),
            after=("loader.workers=2",),
            both=("loader.start=spawn",),
            note=f"on {platform.system()}, started as Windows starts them",
        ),
    ),
    Claim(
        id="people-persistent",
        guide="people",
        said="persistent_workers spares spawning workers again",
        how="as eyes-persistent, workers started by `spawn`",
        way=Inside(function="spawned_workers_that_stay", seconds=40),
    ),
    Claim(
        id="people-prefetch",
        guide="people",
        said="prefetch_factor=1 instead of 2 lowers contention for memory",
        how=f"{_IN_TURNS}, 2 workers",
        way=Switch(before=("loader.prefetch=2",), after=("loader.prefetch=1",), both=("loader.workers=2",)),
    ),
    Claim(
        id="people-drop-last",
        guide="people",
        said="A loader with batch_sampler and drop_last=True avoids changing shapes",
        promised="no number",
        how="the loader made as written",
        way=Shown(function="both_samplers"),
    ),
    Claim(
        id="people-bar",
        guide="people",
        said="The progress bar drawn every 10 batches instead of every 5",
        promised="1.1x",
        least=1.1,
        how="a bar with two figures drawn, timed, against an update",
        way=Inside(function="progress_bar"),
    ),
    Claim(
        id="people-overall",
        guide="people",
        said="All of it: from 1.9 to 8-15 iterations/s",
        promised="4-8x",
        least=4,
        most=8,
        how="sampler, printed lines, norms and bar as the guide had them and as they are here, against an update; "
        "copies and workers are apart",
        way=Inside(function="all_of_it", seconds=20),
    ),
    Claim(
        id="people-epochs",
        guide="people",
        said="An epoch in 2-4 minutes instead of 16-17",
        promised="4-8x",
        how="batches of an epoch before and after, from the guide's own logs",
        way=Shown(function="minutes_of_an_epoch"),
    ),
    Claim(
        id="people-factors",
        guide="people",
        said="3-5x, 2x, 1.5x, 1.3x, 1.2x and 1.1x come to 4-8x",
        promised="4-8x",
        how="computed: the shares of the time that such factors ask for, and their product",
        way=Shown(function="shares_of_time"),
    ),
    Claim(
        id="people-batch",
        guide="people",
        said="64 samples (16 people by 4) instead of 32 (8 by 4)",
        how=f"{_IN_TURNS}: samples/s",
        way=Switch(
            before=("data.sampler.people=8", "data.sampler.each=4", *_batch(32)),
            after=("data.sampler.people=16", "data.sampler.each=4", *_batch(64)),
        ),
    ),
    Claim(
        id="people-accumulation",
        guide="people",
        said="Accumulating 2 batches of P x K doubles the effective batch",
        promised="2 x 32 is 64",
        how="the gradient of a batch and of its two halves compared, in training mode",
        way=Shown(function="two_portions", recipe=True, seconds=10),
    ),
    Claim(
        id="people-compile",
        guide="people",
        said="torch.compile(mode='reduce-overhead')",
        how=f"{_IN_TURNS}, compiling left out; the mode is CUDA graphs, which a CPU has not",
        way=Switch(**_GRAPHS),
    ),
)

_SCENES = (
    Claim(
        id="scenes-amp",
        guide="scenes",
        said="use_fp16=True",
        promised="2x",
        least=1.9,
        how=f"{_IN_TURNS}: float32 and fp16; `about 2x` is taken as 1.9 or more",
        way=Switch(gpu=True, **_FP16),
    ),
    Claim(
        id="scenes-amp-memory",
        guide="scenes",
        said="use_fp16=True halves the GPU's memory",
        how="the same trainings: most memory that the allocator gave away",
        way=Switch(gpu=True, of="memory", **_FP16),
        **_HALF_OF,
    ),
    Claim(
        id="scenes-loader",
        guide="scenes",
        said="num_workers as many as cores, pin_memory, persistent_workers, prefetch_factor=2",
        promised="20-30 %",
        least=1.2,
        most=1.3,
        how=f"{_IN_TURNS}: no workers, and as many as there are cores",
        way=Switch(**_WORKERS),
    ),
    Claim(
        id="scenes-workers",
        guide="scenes",
        said="Half as many workers as cores or as many, never more than 16",
        promised="no number",
        how="a rule for choosing",
        way=Cannot(why="it is a range and not a gain; rung `workers` of the ladder finds the best number"),
    ),
    Claim(
        id="scenes-prefetch",
        guide="scenes",
        said="prefetch_factor of 4 instead of 2, where memory allows",
        how=f"{_IN_TURNS}, as many workers as cores",
        way=Switch(before=("loader.prefetch=2",), after=("loader.prefetch=4",), both=("loader.workers={cores}",)),
    ),
    Claim(
        id="scenes-ahead",
        guide="scenes",
        said="prefetch_factor=2 shortens the wait for batches",
        promised="faster",
        how="torch's own default asked for",
        way=Shown(function="ahead_by_default"),
    ),
    Claim(
        id="scenes-cudnn",
        guide="scenes",
        said="cudnn.deterministic=False",
        promised="5-10 %",
        least=1.05,
        most=1.1,
        how=f"{_IN_TURNS}: deterministic kernels alone, and any with cudnn.benchmark",
        way=Switch(
            before=("device.deterministic=true",),
            after=("device.deterministic=false", "device.cudnn_benchmark=true"),
            gpu=True,
        ),
    ),
    Claim(
        id="scenes-accumulation",
        guide="scenes",
        said="A batch of 32 with two accumulation steps is a batch of 64",
        promised="2 x 32 is 64",
        how="the gradient of a batch and of its two halves compared, in training mode",
        way=Shown(function="two_portions", recipe=True, seconds=10),
    ),
    Claim(
        id="scenes-accumulation-memory",
        guide="scenes",
        said="Accumulation takes no more memory: of 2 micro-batches as much as of one",
        promised="no more, taken as 5 % at most",
        least=0.95,
        how=_IN_TURNS,
        way=Switch(
            before=("train.batch_size=4", "train.micro_batch=4"),
            after=("train.batch_size=8", "train.micro_batch=4"),
            of="memory",
            gpu=True,
        ),
    ),
    Claim(
        id="scenes-batch",
        guide="scenes",
        said="A batch of 64 instead of 32",
        promised="10-20 %",
        least=1.1,
        most=1.2,
        how=f"{_IN_TURNS}: samples/s",
        way=Switch(before=_batch(32), after=_batch(64), gpu=True),
    ),
    Claim(
        id="scenes-overall",
        guide="scenes",
        said="All of it",
        promised="2-3x",
        least=2,
        most=3,
        how=f"{_IN_TURNS}: float32, no workers, no pinning, deterministic, batches of 32; and fp16, as many workers as "
        "cores, pinned, cudnn.benchmark, batches of 64",
        way=Switch(
            before=(
                "train.precision=no",
                "device.tf32=false",
                "loader.workers=0",
                "loader.pin=false",
                "device.deterministic=true",
                *_batch(32),
            ),
            after=("train.precision=fp16", "device.tf32=false", "loader.workers={cores}", *_batch(64)),
            gpu=True,
        ),
    ),
    Claim(
        id="scenes-utilisation",
        guide="scenes",
        said="GPU utilisation rises from 50-60 % to 80-90 %; below 80 % more workers or a larger batch are needed",
        promised="80-90 %",
        how="a rule of thumb",
        way=_UTILISATION,
    ),
    Claim(
        id="scenes-accuracy",
        guide="scenes",
        said="fp16 costs less than 1 % of accuracy",
        promised="1 % at most",
        how="a statement about learning",
        way=Cannot(why="it takes whole trainings of several seeds; the ladder states the drift of loss and outputs"),
    ),
    Claim(
        id="scenes-distance",
        guide="scenes",
        said="Distance maps computed once and kept",
        how="maps of a batch's crops computed, against an update",
        way=Inside(function="distance_maps"),
    ),
    Claim(
        id="scenes-cache",
        guide="scenes",
        said="All data in memory and num_workers=0",
        how=f"{_IN_TURNS}: as many workers as cores, and none, over memory-mapped pictures",
        way=Switch(before=("loader.workers={cores}",), after=("loader.workers=0",)),
    ),
    Claim(
        id="scenes-format",
        guide="scenes",
        said="A faster image format such as HDF5",
        how="trainkit imports pictures once into a packed form",
        way=Cannot(why="HDF5 is a container and no format of images; data are packed here in any case"),
    ),
    Claim(
        id="scenes-disk",
        guide="scenes",
        said="An NVMe disk instead of a rotating one makes loading much faster",
        how="it takes both disks",
        way=Cannot(why="it takes two kinds of disk, and after the first epoch data of this size are in memory"),
    ),
    Claim(
        id="scenes-evaluation",
        guide="scenes",
        said="Evaluating half as often",
        how="seconds of an update and of an evaluation, measured; 20 epochs, computed from them",
        way=Whole(evaluation="", every=("1 epoch", "2 epochs"), length="20 epochs"),
    ),
    Claim(
        id="scenes-scales",
        guide="scenes",
        said="Fewer sizes of the picture in an evaluation",
        how="the evaluation at all sizes and at one, timed twice",
        way=Inside(function="scales", seconds=30),
    ),
    Claim(
        id="scenes-early",
        guide="scenes",
        said="Stopping early when it has converged",
        how="a shorter training, not a faster one",
        way=Cannot(why="it makes a training shorter and no update faster; `stop_when` does it"),
    ),
    Claim(
        id="scenes-stopwatch",
        guide="scenes",
        said="Two sums of seconds inside the loop show whether data loading is the bottleneck",
        promised="no number",
        how="the guide's lines run over a loader that takes 5 ms a batch and a step that takes none",
        way=Shown(function="guides_stopwatch"),
    ),
    Claim(
        id="scenes-compile",
        guide="scenes",
        said="torch.compile",
        how=f"{_IN_TURNS}, compiling left out",
        way=Switch(before=("train.compile=off",), after=("train.compile=default",), gpu=True, compiles=True),
    ),
)

_ORGANS = (
    Claim(
        id="organs-amp",
        guide="organs",
        said="Mixed precision",
        promised="30-50 %",
        least=1.3,
        most=1.5,
        how=f"{_IN_TURNS}: float32 and fp16",
        way=Switch(gpu=True, **_FP16),
    ),
    Claim(
        id="organs-amp-memory",
        guide="organs",
        said="Mixed precision halves the GPU's memory",
        how="the same trainings: most memory that the allocator gave away",
        way=Switch(gpu=True, of="memory", **_FP16),
        **_HALF_OF,
    ),
    Claim(
        id="organs-loader",
        guide="organs",
        said="prefetch_factor=2, persistent_workers, non_blocking, 16 workers",
        promised="10-20 %",
        least=1.1,
        most=1.2,
        how=f"{_IN_TURNS}: no workers, and as many as there are cores",
        way=Switch(**_WORKERS),
    ),
    Claim(
        id="organs-transfer",
        guide="organs",
        said="non_blocking=True makes copies to the GPU run beside the computation",
        how=f"{_IN_TURNS}: without page-locked memory, which makes such copies wait, and with it",
        way=Switch(**_PIN),
    ),
    Claim(
        id="organs-compile",
        guide="organs",
        said="torch.compile",
        promised="10-20 %",
        least=1.1,
        most=1.2,
        how=f"{_IN_TURNS}, compiling left out",
        way=Switch(before=("train.compile=off",), after=("train.compile=default",), compiles=True),
    ),
    Claim(
        id="organs-compile-inference",
        guide="organs",
        said="torch.compile in inference",
        promised="10-20 %",
        least=1.1,
        most=1.2,
        how="a batch predicted by the network as it is and compiled, in turns",
        way=Inside(function="compiled_inference", compiles=True, seconds=60),
    ),
    Claim(
        id="organs-compile-overhead",
        guide="organs",
        said="torch.compile(mode='reduce-overhead')",
        how=f"{_IN_TURNS}, compiling left out; the mode is CUDA graphs, which a CPU has not",
        way=Switch(**_GRAPHS),
    ),
    Claim(
        id="organs-validation",
        guide="organs",
        said="Validating every 20 epochs instead of every 10",
        promised="5-10 % of the time",
        least=1 / 0.95,
        most=1 / 0.9,
        how="seconds of an update and of an evaluation of whole volumes, measured; 300 epochs, computed from them",
        way=Whole(evaluation="val", every=("10 epochs", "20 epochs"), length="300 epochs"),
    ),
    Claim(
        id="organs-tf32",
        guide="organs",
        said="allow_tf32=True",
        how=f"{_IN_TURNS}, float32",
        way=Switch(before=("device.tf32=false",), after=("device.tf32=true",), both=("train.precision=no",), gpu=True),
    ),
    Claim(
        id="organs-cudnn",
        guide="organs",
        said="cudnn.benchmark=True",
        how=_IN_TURNS,
        way=Switch(before=("device.cudnn_benchmark=false",), after=("device.cudnn_benchmark=true",), gpu=True),
    ),
    Claim(
        id="organs-split",
        guide="organs",
        said="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        how=f"{_IN_TURNS}, without expandable segments",
        way=Switch(
            both=("device.expandable_segments=false",),
            environment=(("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),),
            gpu=True,
        ),
    ),
    Claim(
        id="organs-split-memory",
        guide="organs",
        said="The same, less memory",
        promised="less memory",
        how="the same trainings: most memory that the allocator gave away",
        way=Switch(
            both=("device.expandable_segments=false",),
            environment=(("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),),
            of="memory",
            gpu=True,
        ),
    ),
    Claim(
        id="organs-cudnn-v8",
        guide="organs",
        said="TORCH_CUDNN_V8_API_ENABLED=1",
        how="the name looked for in torch's libraries: what reads a variable holds its name",
        way=Shown(function="name_in_libraries"),
    ),
    Claim(
        id="organs-blocking",
        guide="organs",
        said="CUDA_LAUNCH_BLOCKING=0",
        how=f"{_IN_TURNS}: the variable unset and 0, which is its default",
        way=Switch(environment=(("CUDA_LAUNCH_BLOCKING", "0"),), gpu=True),
    ),
    Claim(
        id="organs-memory-batch",
        guide="organs",
        said="GPU memory in GB divided by 2 is about the batch",
        promised="24 GB: 12",
        how="bytes that backward keeps for one more sample, counted; true if 24 GB hold 6 to 24",
        way=Shown(function="half_the_memory", recipe=True, seconds=10),
    ),
    Claim(
        id="organs-batch",
        guide="organs",
        said="A batch of 8-12 instead of 6: 5-15 % better use of the GPU",
        promised="5-15 %",
        least=1.05,
        most=1.15,
        how=f"{_IN_TURNS}: samples/s of 12 and of 6",
        way=Switch(before=_batch(6), after=_batch(12), gpu=True),
    ),
    Claim(
        id="organs-cache",
        guide="organs",
        said="Data kept in memory, for small data sets",
        how=f"{_IN_TURNS}: volumes mapped from disk, and held in memory",
        way=Switch(before=("data.cache=disk",), after=("data.cache=ram",)),
    ),
    Claim(
        id="organs-overall",
        guide="organs",
        said="All of it",
        promised="50-80 %",
        least=1.5,
        most=1.8,
        how=f"{_IN_TURNS}: float32, no workers, without cudnn.benchmark, batches of 6; and fp16, compiled, as many "
        "workers as cores, TF32, cudnn.benchmark, batches of 12",
        way=Switch(
            before=(
                "train.precision=no",
                "device.tf32=false",
                "device.cudnn_benchmark=false",
                "loader.workers=0",
                *_batch(6),
            ),
            after=("train.precision=fp16", "train.compile=default", "loader.workers={cores}", *_batch(12)),
            gpu=True,
            compiles=True,
        ),
    ),
    Claim(
        id="organs-factors",
        guide="organs",
        said="30-50 %, 10-20 %, 10-20 % and 5-10 % come to 50-80 %",
        promised="50-80 %",
        how="computed",
        way=Shown(function="factors_of_organs"),
    ),
    Claim(
        id="organs-utilisation",
        guide="organs",
        said="GPU utilisation should be 80 % or more",
        promised="80 %",
        how="a rule of thumb",
        way=_UTILISATION,
    ),
)

CLAIMS: tuple[Claim, ...] = (*_FACES, *_EYES, *_PEOPLE, *_SCENES, *_ORGANS)
"""All of them, by guide."""
