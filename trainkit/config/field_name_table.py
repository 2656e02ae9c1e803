"""The names that other trainers use for settings, each with trainkit's key, option or environment variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
_YES = {"": "true", "1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


@dataclass(frozen=True)
class FieldName:
    """One name of another tool, and what stands for it here."""

    name: str
    """The other tool's name, without leading dashes, with underscores."""
    tool: str
    """Tools that use the name."""
    ours: tuple[str, ...] = ()
    """Recipe keys, `--options` or environment variables. Of several keys, a recipe has one, by its task and data.
    Empty: there is no counterpart, and `note` says why."""
    note: str = ""
    """One sentence on what differs."""
    write: str = ""
    """Format of the value in trainkit: `{} epochs`. Empty: a number cannot be converted."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Values that have another name in trainkit, in lower case."""
    example: str = ""
    """A value of the other tool that converts."""

    @property
    def is_key(self) -> bool:
        """True where the counterpart is a key of the recipe."""
        return bool(self.ours) and not self.ours[0].startswith("-") and not self.ours[0].isupper()

    @property
    def is_flag(self) -> bool:
        """True where the other tool's option can stand without a value."""
        return "true" in self.words

    def convert(self, value: str) -> str | None:
        """Return the value as trainkit takes it; None where it cannot be converted."""
        text = value.strip().strip("'\"")
        word = text.lower()
        if self.is_flag:
            word = _YES.get(word, word)
        if word in self.words:
            return self.words[word]
        if not self.write:
            return None
        if self.write == "{}":
            return text or None
        if not _NUMBER.fullmatch(text) or float(text) <= 0:
            return None
        if self.write == "{} steps|epochs":  # Lightning: a fraction of an epoch, or a number of steps
            return f"{text} epochs" if "." in text else f"{text} steps"
        said = self.write.format(text)
        return said.removesuffix("s") if text == "1" and said.endswith(("epochs", "steps")) else said


def _named(
    names: str,
    *ours: str,
    note: str = "",
    write: str = "",
    words: Mapping[str, str] | None = None,
    example: str = "",
) -> list[FieldName]:
    """Make the entries of `NAME: TOOL TOOL | NAME: TOOL`."""
    pairs = (entry.split(": ") for entry in names.split(" | "))
    tools = {name: used.replace(" ", ", ").replace("HuggingFace", "Hugging Face") for name, used in pairs}
    return [FieldName(name, used, ours, note, write, words or {}, example) for name, used in tools.items()]


_SWITCH = {"true": "true", "false": "false"}
_TIMM_OR_LIGHT = "with data.augment {name: timm} or {name: light}"
_PER_STEP = "train.batch_size counts the samples of a step over all processes"
_AUTO = "auto takes bf16 where the GPU has it, else fp16, and float32 on a CPU"
_RUN = "a run's folder and MLflow run get their names from trainkit"

FIELD_NAMES: tuple[FieldName, ...] = (
    # length
    *_named(
        "epochs: timm Ultralytics guides | max_epochs: Lightning guides | num_epochs: nnU-Net guides | "
        "num_epoch: InsightFace | num_train_epochs: HuggingFace | n_epochs: guides",
        "train.length",
        write="{} epochs",
        example="10",
    ),
    *_named(
        "max_steps: Lightning HuggingFace | steps: guides | num_steps: guides | total_steps: guides | "
        "max_iter: guides | max_iters: guides | iterations: guides",
        "train.length",
        write="{} steps",
        example="5000",
    ),
    *_named(
        "fast_dev_run: Lightning",
        "train.length",
        write="{} steps",
        words={"true": "2 steps"},
        example="2",
    ),
    *_named(
        "patience: Ultralytics Lightning | early_stopping_patience: HuggingFace | early_stop: guides",
        "stop_when.patience",
        note="it counts evaluations, not epochs",
        write="{}",
        example="5",
    ),
    # batch
    *_named(
        "batch: Ultralytics | bs: guides | batchsize: guides | train_batch_size: guides | total_batch_size: guides",
        "train.batch_size",
        note=_PER_STEP,
        write="{}",
        example="64",
    ),
    *_named(
        "batch_size: timm InsightFace Lightning nnU-Net guides | b: timm",
        "train.batch_size",
        note=f'{_PER_STEP}; a size for each process is train.batch_size="64 per process"',
        write="{}",
        example="64",
    ),
    *_named(
        "per_device_train_batch_size: HuggingFace | ims_per_gpu: guides | batch_size_per_gpu: guides",
        "train.batch_size",
        write="{} per process",
        example="16",
    ),
    *_named(
        "per_device_eval_batch_size: HuggingFace | eval_batch_size: guides | val_batch_size: guides | "
        "validation_batch_size: timm | eval_ims_per_gpu: guides",
        "evaluations.NAME.batch_size",
        write="{}",
        example="64",
    ),
    *_named(
        "accumulate: guides | accumulate_grad_batches: Lightning | grad_accum: guides | "
        "grad_accum_steps: timm | gradient_acc: InsightFace | "
        "gradient_accumulation_steps: HuggingFace guides | accumulation_steps: guides",
        "train.micro_batch",
        note="set train.batch_size to the samples of a step, train.micro_batch to those of one forward pass",
    ),
    # optim
    *_named(
        "lr: timm InsightFace | learning_rate: HuggingFace Lightning | lr0: Ultralytics | "
        "initial_lr: nnU-Net | base_lr: guides | lr_start: guides | max_lr: guides",
        "optim.lr",
        write="{}",
        example="0.1",
    ),
    *_named(
        "lr_base: timm | blr: guides",
        "optim.lr",
        note="add optim.lr_rule to scale it with the batch",
        write="{}",
        example="0.1",
    ),
    *_named("wd: guides | decay: guides | weight_decay: all", "optim.weight_decay", write="{}", example="0.05"),
    *_named(
        "opt: timm | optimizer: Ultralytics InsightFace | optim_name: guides",
        "optim.name",
        note="it is sgd, adam, adamw or timm:NAME",
        words={"sgd": "sgd", "adam": "adam", "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
        example="adamw",
    ),
    *_named("opt_eps: timm | adam_epsilon: HuggingFace", "optim.eps", write="{}", example="1e-8"),
    *_named(
        "opt_betas: timm | adam_beta1: HuggingFace | adam_beta2: HuggingFace",
        "optim.betas",
        note="a list, such as [0.9, 0.999]",
    ),
    *_named(
        "clip_grad: timm | gradient_clip_val: Lightning | max_grad_norm: HuggingFace | grad_clip: guides | "
        "clip_grad_norm: guides | max_norm: guides",
        "optim.clip_norm",
        write="{}",
        example="1.0",
    ),
    *_named(
        "clip_mode: timm | gradient_clip_algorithm: Lightning",
        "optim.clip_norm",
        note="for agc set optim.clip_agc.factor instead",
    ),
    # schedule
    *_named(
        "warmup_epochs: timm Ultralytics guides | warmup_epoch: InsightFace",
        "train.schedule.warmup.over",
        write="{} epochs",
        example="1",
    ),
    *_named(
        "warmup_steps: HuggingFace | warmup_iters: guides | num_warmup_steps: HuggingFace",
        "train.schedule.warmup.over",
        write="{} steps",
        example="50",
    ),
    *_named(
        "warmup_ratio: HuggingFace",
        "train.schedule.warmup.over",
        note="write the length of the warm-up, such as 1 epoch",
    ),
    *_named(
        "warmup_lr: timm", "train.schedule.warmup.start", note="it is a factor of optim.lr: divide the rate by optim.lr"
    ),
    *_named("cos_lr: Ultralytics", "train.schedule.name", words={"true": "cosine"}, example="true"),
    *_named(
        "sched: timm | scheduler: guides | lr_scheduler: guides | lr_scheduler_type: HuggingFace | lr_schedule: guides",
        "train.schedule.name",
        note="it is constant, steps, cosine, poly or plateau",
        words={"cosine": "cosine", "constant": "constant", "poly": "poly"},
        example="cosine",
    ),
    *_named(
        "lrf: Ultralytics",
        "train.schedule.floor",
        note="the last factor of optim.lr, for cosine and poly",
        write="{}",
        example="0.01",
    ),
    *_named(
        "min_lr: timm | eta_min: guides",
        "train.schedule.floor",
        note="it is a factor of optim.lr: divide the rate by optim.lr",
    ),
    *_named(
        "milestones: guides | decay_epochs: timm | decay_milestones: timm | lr_milestones: guides",
        "train.schedule.at",
        note="with train.schedule.name=steps: a list of lengths, such as [30 epochs, 60 epochs]",
    ),
    *_named("decay_rate: timm | lr_gamma: guides", "train.schedule.gamma", write="{}", example="0.1"),
    # arithmetic
    *_named(
        "use_amp: guides | amp: timm Ultralytics | enable_amp: guides",
        "train.precision",
        note=_AUTO,
        words={"true": "auto", "false": "no", "bf16": "bf16", "fp16": "fp16"},
        example="true",
    ),
    *_named(
        "fp16: HuggingFace InsightFace | use_fp16: guides | half: Ultralytics",
        "train.precision",
        words={"true": "fp16", "false": "no"},
        example="true",
    ),
    *_named(
        "bf16: HuggingFace | use_bf16: guides", "train.precision", words={"true": "bf16", "false": "no"}, example="true"
    ),
    *_named(
        "precision: Lightning | mixed_precision: Accelerate | amp_dtype: timm guides",
        "train.precision",
        words={
            "16": "fp16",
            "16-mixed": "fp16",
            "fp16": "fp16",
            "float16": "fp16",
            "bf16": "bf16",
            "bf16-mixed": "bf16",
            "bfloat16": "bf16",
            "32": "no",
            "32-true": "no",
            "float32": "no",
            "no": "no",
            "fp8": "fp8",
        },
        example="bf16-mixed",
    ),
    *_named("allow_tf32: torch | tf32: HuggingFace", "device.tf32", words=_SWITCH, example="true"),
    *_named(
        "compile: guides | compile_model: guides | torch_compile: HuggingFace | torchcompile: timm | "
        "use_compile: guides | nnunet_compile: nnU-Net",
        "train.compile",
        words={"true": "default", "false": "off", "inductor": "default"},
        example="true",
    ),
    *_named(
        "torch_compile_mode: HuggingFace | torchcompile_mode: timm | compile_mode: guides",
        "train.compile",
        words={m: m for m in ("default", "reduce-overhead", "max-autotune")},
        example="reduce-overhead",
    ),
    *_named(
        "gradient_checkpointing: HuggingFace | grad_checkpointing: timm | grad_checkpoint: guides | "
        "activation_checkpoint: guides | use_checkpoint: guides",
        "train.activation_checkpointing",
        words=_SWITCH,
        example="true",
    ),
    *_named("ema_decay: guides | model_ema_decay: timm", "train.ema", write="{}", example="0.999"),
    *_named(
        "ema: guides | model_ema: timm | use_ema: guides",
        "train.ema",
        note="it is the decay, such as 0.999; null trains without EMA weights",
        words={"false": "null"},
        example="false",
    ),
    # device
    *_named("benchmark: Lightning | cudnn_benchmark: torch", "device.cudnn_benchmark", words=_SWITCH, example="true"),
    *_named(
        "deterministic: Lightning Ultralytics | full_determinism: HuggingFace | use_deterministic_algorithms: torch",
        "device.deterministic",
        words=_SWITCH,
        example="true",
    ),
    *_named("channels_last: timm", "device.channels_last", words=_SWITCH, example="true"),
    *_named("pytorch_cuda_alloc_conf: guides", "device.expandable_segments", note="true by default"),
    *_named(
        "device: timm Ultralytics nnU-Net | devices: Lightning | gpus: guides | num_gpus: nnU-Net | "
        "gpu_ids: guides | cuda: guides",
        "CUDA_VISIBLE_DEVICES",
        note="set it to choose the GPUs; `accelerate launch --num_processes N trainkit/run.py RECIPE` takes several",
    ),
    *_named(
        "accelerator: Lightning | strategy: Lightning | num_nodes: Lightning | world_size: guides | "
        "local_rank: timm HuggingFace | dist_url: guides",
        note="the launcher decides it: `accelerate launch` with a file of accelerate_configs/, or torchrun",
    ),
    *_named(
        "sync_bn: timm | use_sync_bn: guides | sync_batchnorm: Lightning | use_syncbn: guides",
        "task.norm.name",
        note="for the task segment2d",
        words={"true": "sync", "false": "batch"},
        example="true",
    ),
    *_named(
        "random_seed: guides | manual_seed: torch | seed: all | seed_everything: Lightning",
        "seed",
        write="{}",
        example="3",
    ),
    # loader
    *_named(
        "num_workers: Lightning InsightFace guides | workers: timm Ultralytics | j: timm | "
        "dataloader_num_workers: HuggingFace | nnunet_n_proc_da: nnU-Net | n_workers: guides",
        "loader.workers",
        note="0, the default, reads with threads and is fastest for packed data",
        write="{}",
        example="4",
    ),
    *_named(
        "prefetch_factor: Lightning guides | dataloader_prefetch_factor: HuggingFace",
        "loader.prefetch",
        write="{}",
        example="4",
    ),
    *_named(
        "pin_memory: Lightning guides | pin_mem: timm | dataloader_pin_memory: HuggingFace",
        "loader.pin",
        words=_SWITCH,
        example="true",
    ),
    *_named(
        "multiprocessing_context: torch | start_method: guides",
        "loader.start",
        words={m: m for m in ("fork", "spawn", "forkserver")},
        example="spawn",
    ),
    *_named("persistent_workers: Lightning guides", note="workers always live as long as the run"),
    *_named("non_blocking: guides", note="copies to a GPU are always asynchronous where loader.pin is true"),
    *_named(
        "drop_last: guides | dataloader_drop_last: HuggingFace",
        note="a training epoch always leaves an incomplete last batch out, and an evaluation never does",
    ),
    *_named("shuffle: guides", note="training samples are always shuffled, by seed and epoch; evaluations never are"),
    # evaluation
    *_named(
        "check_val_every_n_epoch: Lightning | val_every_n_epochs: guides | val_eval_every_n_epoch: guides | "
        "eval_every_n_epoch: guides | validation_interval: guides | val_interval: timm guides | "
        "eval_interval: guides",
        "evaluations.NAME.every",
        write="{} epochs",
        example="2",
    ),
    *_named(
        "eval_steps: HuggingFace | eval_step_freq: guides | val_eval_step_freq: guides | eval_step: guides",
        "evaluations.NAME.every",
        write="{} steps",
        example="500",
    ),
    *_named("val_check_interval: Lightning", "evaluations.NAME.every", write="{} steps|epochs", example="0.25"),
    *_named(
        "eval_strategy: HuggingFace | evaluation_strategy: HuggingFace",
        "evaluations.NAME.every",
        note="write a length, such as 1 epoch",
        words={"epoch": "1 epoch"},
        example="epoch",
    ),
    *_named(
        "eval_metric: timm | metric_for_best_model: HuggingFace | monitor: Lightning",
        "best.metric",
        note="it is EVALUATION/METRIC, such as val/top1",
    ),
    *_named("greater_is_better: HuggingFace", "best.mode", note="leave it out: it follows from the metric"),
    *_named(
        "eval_scales: guides", "data.eval_scales", note="for data of kind scenes", write="{}", example="[0.75, 1.0]"
    ),
    # checkpoints
    *_named(
        "resume: all | resume_from_checkpoint: HuggingFace | ckpt_path: Lightning | continue_training: nnU-Net",
        "--resume",
        note="`trainkit run --resume RUN` continues a run; weights alone are task.net.weights",
    ),
    *_named(
        "save_dir: guides | output_dir: HuggingFace | output: timm InsightFace | "
        "default_root_dir: Lightning | out_dir: guides | work_dir: guides | respth: guides | "
        "nnunet_results: nnU-Net",
        "TRAINKIT_STORE",
        note=f"set it to a folder; {_RUN}",
    ),
    *_named("save_total_limit: HuggingFace | checkpoint_hist: timm", "checkpoints.keep_last", write="{}", example="3"),
    *_named("save_top_k: Lightning", "checkpoints.keep_best", write="{}", example="1"),
    *_named(
        "save_steps: HuggingFace | every_n_train_steps: Lightning", "checkpoints.every", write="{} steps", example="500"
    ),
    *_named(
        "save_period: Ultralytics | save_every: nnU-Net | save_freq: guides | save_interval: guides | "
        "every_n_epochs: Lightning",
        "checkpoints.every",
        write="{} epochs",
        example="5",
    ),
    *_named(
        "initial_checkpoint: timm | pretrained_weights: nnU-Net | checkpoint: guides | "
        "checkpoint_path: guides | ckpt: guides | load_from: guides",
        "task.net.weights",
        note="a file, run:NAME or models:/NAME@ALIAS",
        write="{}",
        example="weights.safetensors",
    ),
    *_named(
        "pretrained: timm Ultralytics | use_pretrained: guides",
        "task.net.weights",
        note="for networks of timm; task.net.model then needs the tag of its weights",
        words={"true": "pretrained", "false": "null"},
        example="true",
    ),
    # logging
    *_named(
        "log_every_n_steps: Lightning | logging_steps: HuggingFace | log_interval: timm | "
        "log_every: guides | frequent: InsightFace | print_freq: guides",
        "log.every",
        write="{} steps",
        example="100",
    ),
    *_named(
        "norm_every: guides",
        "task.norms",
        "log.every",
        note="feature norms of the task reid; the gradient norm follows log.every",
        write="{} steps",
        example="200",
    ),
    *_named(
        "project: Ultralytics | project_name: guides | experiment_name: guides | experiment: timm",
        "log.experiment",
        write="{}",
        example="faces",
    ),
    *_named(
        "run_name: HuggingFace | exp_name: guides",
        "name",
        note=f"the recipe's name; {_RUN}",
        write="{}",
        example="faces",
    ),
    *_named(
        "report_to: HuggingFace | logger: Lightning | log_wandb: timm | wandb: guides | "
        "use_tensorboard: guides | tensorboard: guides",
        "MLFLOW_TRACKING_URI",
        note="runs are always logged to MLflow; set it to use a server",
    ),
    *_named("profiler: Lightning | profile_step: guides", "log.profile.at", note="the first step to trace"),
    # data
    *_named(
        "imgsz: Ultralytics | img_size: timm | input_size: timm | image_size: guides | cropsize: guides | "
        "crop_size: guides | patch_size: nnU-Net",
        "data.image_size",
        "data.crop",
        "data.patch",
        note="images, faces and people have data.image_size, scenes data.crop, volumes data.patch",
        write="{}",
        example="64",
    ),
    *_named(
        "data_dir: timm | data_path: guides | data_root: guides | dataset: guides | train_dir: timm | "
        "rec: InsightFace | nnunet_raw: nnU-Net",
        "data.train",
        note="relative paths begin at TRAINKIT_DATA, else at the current folder",
        write="{}",
        example="my_images",
    ),
    *_named(
        "val_dir: guides | val_targets: InsightFace | val_split: timm | val_path: guides",
        "data.evaluate",
        note="a block {NAME: PATH}; evaluations.NAME says when",
    ),
    *_named("val_ratio: guides | val_size: guides | test_size: guides", "data.hold_out", write="{}", example="0.2"),
    *_named(
        "num_classes: timm InsightFace Lightning | nb_classes: guides | n_classes: guides | "
        "n_cats: guides | nc: Ultralytics | num_image: InsightFace | "
        "in_chans: timm | in_channels: guides | num_channels: guides",
        note="it is derived from the data",
    ),
    *_named("oversample_foreground_percent: nnU-Net", "data.foreground", write="{}", example="0.33"),
    *_named("fold: nnU-Net", "data.fold", note="for volumes; --folds trains every fold", write="{}", example="0"),
    *_named("ensure_rgb: guides", "data.sampler.ensure_rgb", words=_SWITCH, example="true"),
    *_named("prefer_complete: guides", "data.sampler.prefer_complete", words=_SWITCH, example="true"),
    *_named(
        "num_instances: guides",
        "data.sampler.each",
        note="train.batch_size is data.sampler.people times it",
        write="{}",
        example="4",
    ),
    *_named(
        "reprob: timm | erasing: Ultralytics | random_erasing: guides",
        "data.augment.re_prob",
        "data.augment.erase",
        note=_TIMM_OR_LIGHT,
        write="{}",
        example="0.25",
    ),
    *_named(
        "aa: timm | auto_augment: Ultralytics | randaugment: guides",
        "data.augment.auto_augment",
        note="with data.augment {name: timm}",
        words={"randaugment": "rand-m9-mstd0.5-inc1", "true": "rand-m9-mstd0.5-inc1", "none": "null"},
        example="randaugment",
    ),
    *_named(
        "hflip: timm | fliplr: Ultralytics",
        "data.augment.hflip",
        "data.augment.flip",
        note=_TIMM_OR_LIGHT,
        write="{}",
        example="0.5",
    ),
    *_named(
        "color_jitter: timm",
        "data.augment.color_jitter",
        note="with data.augment {name: timm}",
        write="{}",
        example="0.4",
    ),
    # network
    *_named(
        "model: timm Ultralytics | arch: guides | model_name: guides | backbone: guides",
        "task.net.model",
        "task.net.encoder",
        note="a name of timm for the tasks classify and reid; other tasks choose with task.net.name",
    ),
    *_named(
        "network: InsightFace",
        "task.net.name",
        note="for the task embed: mobilefacenet, iresnet18, iresnet34, iresnet50, iresnet100, ...",
    ),
    *_named("embedding_size: InsightFace | embedding_dim: guides", "task.net.embedding", write="{}", example="256"),
    *_named("model_kwargs: timm", "task.net.args", note="a block of arguments of the network's constructor"),
    *_named(
        "drop_path: timm | drop_path_rate: timm | stochastic_depth: guides",
        "task.net.drop_path",
        write="{}",
        example="0.1",
    ),
    *_named("drop: timm | drop_rate: timm | dropout: Ultralytics", "task.net.dropout", write="{}", example="0.1"),
    *_named("mixup: timm Ultralytics | mixup_alpha: guides", "task.mix.mixup", write="{}", example="0.8"),
    *_named("cutmix: timm Ultralytics | cutmix_alpha: guides", "task.mix.cutmix", write="{}", example="1.0"),
    *_named(
        "mixup_prob: timm", "task.mix.prob", note="with task.mix.mixup or task.mix.cutmix", write="{}", example="1.0"
    ),
    *_named(
        "mixup_switch_prob: timm",
        "task.mix.switch",
        note="with task.mix.mixup or task.mix.cutmix",
        write="{}",
        example="0.5",
    ),
    *_named(
        "smoothing: timm | label_smoothing: Ultralytics torch | label_smoothing_factor: HuggingFace",
        "task.smoothing",
        "task.identity.smoothing",
        write="{}",
        example="0.1",
    ),
    *_named("margin_list: InsightFace", "task.margin", note="a block such as {name: arcface, m: 0.5, scale: 64}"),
    *_named(
        "freeze: Ultralytics | freeze_backbone: guides",
        "task.net.tune",
        note="head or linear trains the last layers alone; it needs task.net.weights",
        words={"true": "head", "false": "all"},
        example="false",
    ),
    *_named("enable_deep_supervision: nnU-Net", "task.net.deep_supervision", words=_SWITCH, example="true"),
    *_named("sample_rate: InsightFace", note="all classes are used in every step; Partial FC is not available"),
)
"""Every name, in the order of the migration guide."""
