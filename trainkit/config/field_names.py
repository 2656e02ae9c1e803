"""The names that other trainers use for settings, and the answer to an unknown key or option with such a name.

They are those of Lightning, timm, Hugging Face's Trainer, InsightFace, nnU-Net and Ultralytics that are typed by habit.
Names that a single block of a recipe has too, such as `lr`, need no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NAMES = {
    "train.length": "epochs max_epochs num_epochs num_train_epochs max_steps",
    "train.batch_size": "batch batch_size per_device_train_batch_size",
    "train.micro_batch": "accumulate_grad_batches gradient_accumulation_steps",
    "train.precision": "amp fp16 bf16 mixed_precision",
    "train.compile": "torch_compile",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.ema": "model_ema",
    "train.schedule.name": "sched lr_scheduler_type cos_lr",
    "train.schedule.warmup.over": "warmup_epochs warmup_steps warmup_ratio",
    "optim.lr": "learning_rate lr0",
    "optim.weight_decay": "wd",
    "optim.name": "opt optimizer",
    "optim.clip_norm": "clip_grad gradient_clip_val max_grad_norm",
    "loader.workers": "num_workers",
    "loader.pin": "pin_memory",
    "evaluations.NAME.every": "check_val_every_n_epoch val_check_interval eval_steps",
    "evaluations.NAME.batch_size": "per_device_eval_batch_size",
    "best.metric": "monitor metric_for_best_model eval_metric",
    "stop_when.patience": "patience early_stopping_patience",
    "checkpoints.every": "save_steps",
    "checkpoints.keep_last": "save_total_limit",
    "log.every": "log_every_n_steps logging_steps",
    "data.train": "data_dir",
    "data.image_size data.crop data.patch": "imgsz img_size input_size patch_size",
    "task.net.weights": "pretrained initial_checkpoint",
    "task.smoothing task.identity.smoothing": "label_smoothing",
    "--resume": "resume ckpt_path",
    "TRAINKIT_STORE": "output_dir default_root_dir",
    "CUDA_VISIBLE_DEVICES": "devices gpus",
}
FIELD_NAMES = {name: tuple(ours.split()) for ours, names in _NAMES.items() for name in names.split()}
"""Another tool's name, with underscores, to what stands for it: a recipe's key, an `--option` or an environment
variable. Of several keys, a recipe has one, by its task and data."""


def find(name: str) -> tuple[str, ...]:
    """Return what stands for a name, written with dashes or underscores, in any case; empty where it is unknown."""
    return FIELD_NAMES.get(name.lstrip("-").replace("-", "_").lower(), ())


def advise(name: str, has: Callable[[str], bool], around: str, siblings: Sequence[str]) -> str:
    """Say what stands for an unknown key; empty where that is not known.

    `around` is the dotted path of the block with the unknown key, and `siblings` are that block's keys; `has` is true
    for keys that the recipe may have.
    """
    ours = find(name)
    here = next((last for key in ours if (last := key.rpartition(".")[2]) in siblings), "")
    if here and around:
        return f"trainkit's key is {around}.{here}"
    return _said(next(filter(has, ours), ours[0])) if ours else ""


def of_option(option: str) -> str:
    """Say what stands for an option of another trainer; empty where that is not known."""
    ours = find(option)
    return _said(ours[0]) if ours else ""


def _said(ours: str) -> str:
    if ours.startswith("--"):
        return f"use the option {ours}"
    return f"use the environment variable {ours}" if ours.isupper() else f"trainkit's key is {ours}"
