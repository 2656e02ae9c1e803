"""Plans: how an update is divided among processes, which of them have samples of it, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planned_recipes import PROCESSES, stand_in

from trainkit.config import loader
from trainkit.config.loader import RECIPES, ConfigError
from trainkit.config.units import PerProcess
from trainkit.errors import UserError
from trainkit.interfaces import Loss
from trainkit.tasks.segment2d import Segment2d
from trainkit.training.plan import Plan, describe, halved

FILES = sorted(RECIPES.glob("*.yaml"))


def plans(recipe, world, data=None):
    return [Plan.make(recipe, data or stand_in(recipe), world, rank) for rank in range(world)]


def described(recipe, plan):
    return describe(recipe, plan, {name: SimpleNamespace(size=8) for name in recipe.evaluations}, {})


def classified(*words):
    return loader.load(RECIPES / "convnext.yaml", words)


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_and_means_the_same(path, processes):
    recipe = loader.load(path)
    data, made = stand_in(recipe), plans(recipe, processes)
    alone = Plan.make(recipe, data, 1, 0)
    assert (
        (made[0].batch_size, made[0].steps) == (alone.batch_size, alone.steps) == (recipe.train.batch_size, alone.steps)
    )
    assert all(p.share * p.active == p.batch_size for p in made)
    read = [[p.rows(data.train, data.train.order(0, p.batch_size), 1, m) for m in range(p.accumulation)] for p in made]
    counted = np.concatenate([np.concatenate(rows) for p, rows in zip(made, read, strict=True) if p.rank < p.active])
    assert sorted(counted.tolist()) == list(range(alone.batch_size, 2 * alone.batch_size)), "every sample of it once"
    for plan, rows in zip(made, read, strict=True):
        assert (np.concatenate(rows) == np.concatenate(read[plan.rank % plan.active])).all()


@pytest.mark.parametrize(
    ("batch", "world", "norm", "least", "active"),
    [
        (4, 8, None, 1, 4),
        (4, 6, "batch", 1, 4),
        (4, 6, "sync", 1, 2),  # of 4, two would be seen twice
        (4, 4, "batch", 2, 2),
        (4, 4, "sync", 2, 4),
        (2, 16, "batch", 2, 1),
        (3, 3, "batch", 2, 1),
    ],
)
def test_of_more_processes_than_samples_as_many_train_as_the_update_and_its_norms_have_samples_for(
    batch, world, norm, least, active
):
    recipe = classified(f"train.batch_size={batch}")
    recipe.task = loader.load(RECIPES / "camvid.yaml", [f"task.norm.name={norm or 'group'}"]).task
    assert isinstance(recipe.task, Segment2d)
    recipe.task._least = least
    made = plans(recipe, world)
    assert {p.active for p in made} == {active} and made[0].micro_batch == batch // active
    said = described(recipe, made[0])
    assert (f"Idle        {world - active} of {world} processes: " in said) == (active < world)


def test_an_idle_process_counts_nothing_and_is_not_gathered():
    made = plans(classified("train.batch_size=2"), 4)
    loss = Loss(torch.tensor(3.0), 1, {})
    assert [float(p.counted(loss).sum) for p in made] == [3, 3, 0, 0]
    assert [p.counted(loss).weight for p in made] == [1, 1, 0, 0]
    everywhere = torch.arange(8).reshape(4, 2)
    assert made[3].gathered(lambda x, grad=False: everywhere.reshape(-1))(everywhere[3]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "world", "ways"),
    [(250, 8, '248 or 256, or "31 per process"'), (6, 4, '4 or 8, or "1 per process"')],
)
def test_a_batch_that_leaves_samples_over_is_refused_in_a_sentence_with_what_divides(batch, world, ways):
    recipe = classified(f"train.batch_size={batch}")
    with pytest.raises(UserError) as error:
        Plan.make(recipe, stand_in(recipe), world, 0)
    assert str(error.value).startswith(f"train.batch_size: {batch} over {world} processes; expected equally many")
    assert str(error.value).endswith(f"try train.batch_size={ways}")


# ---- So many samples per process


def test_a_batch_size_per_process_grows_with_the_processes_and_so_does_what_follows_from_it():
    words = ("train.schedule={name: constant}", "optim.lr=1e-3", "optim.lr_rule={name: linear, batch_size: 8}")
    recipe = classified("train.batch_size=4 per process", *words)
    assert recipe.train.batch_size == PerProcess(4)
    made = [Plan.make(recipe, stand_in(recipe, 160), world, 0) for world in (1, 2, 8)]
    assert [(p.batch_size, p.micro_batch, p.idle, p.steps_per_epoch) for p in made] == [
        (4, 4, 0, 40),
        (8, 4, 0, 20),
        (32, 4, 0, 5),
    ]
    assert [p.lr(recipe, 0) for p in made] == pytest.approx([0.5e-3, 1e-3, 4e-3])


def test_a_batch_size_per_process_is_written_back_and_hashed_as_its_text():
    recipe = classified("train.batch_size=4 per process")
    assert loader.flat(recipe)["train.batch_size"] == "4 per process"
    assert "batch_size: 4 per process" in loader.dump(recipe)
    assert loader.hashed(recipe)["train"]["batch_size"] == "4 per process"
    assert loader.digest(recipe) != loader.digest(classified("train.batch_size=4"))
    with pytest.raises(ConfigError, match="batch_size 6 per process is not a multiple of micro_batch 4"):
        classified("train.batch_size=6 per process", "train.micro_batch=4")


@pytest.mark.parametrize(
    "value", ["0 per process", "per process", "4 per node", "{samples: 4}", "[4]", "4.5", "true", "0"]
)
def test_what_is_no_batch_size_is_refused_at_its_key(value):
    with pytest.raises(ConfigError, match=r"train\.batch_size \(override") as error:
        classified(f"train.batch_size={value}")
    assert len(error.value.problems) == 1


# ---- Blocks of samples that belong together


def people(*words):
    return loader.load(RECIPES / "reid.yaml", words)


@pytest.mark.parametrize(
    ("blocks", "world", "cut"),
    # active processes, parts of a block, micro-batch, accumulation
    [
        (1, 1, (1, 1, 80, 1)),
        (1, 2, (2, 2, 40, 1)),
        (1, 16, (16, 16, 5, 1)),
        (1, 32, (16, 16, 5, 1)),  # a person is on one process
        (2, 2, (2, 1, 80, 1)),  # whole blocks, while there are enough
        (4, 2, (2, 1, 80, 2)),
        (2, 4, (4, 4, 20, 2)),
        (3, 2, (2, 2, 40, 3)),
    ],
)
def test_processes_share_a_block_where_there_are_too_few(blocks, world, cut):
    recipe = people(f"train.batch_size={80 * blocks}")
    for plan in plans(recipe, world):
        assert (plan.active, plan.parts, plan.micro_batch, plan.accumulation) == cut
    said = described(recipe, plan)
    assert ("share each block of 80" in said) == (cut[1] > 1)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["task.gather=local"], 2, r"1 block of 80, .* over 2 processes; .*train\.batch_size=160 .*task\.gather=all"),
        ([], 3, r"expected equally many of its 16 people on each; take a multiple of 3 people; or .*=240"),
        (["train.batch_size=30 per process", "train.micro_batch=null"], 2, "a batch of 60 samples in micro-batches"),
    ],
)
def test_blocks_that_cannot_be_shared_are_refused_with_what_to_write(words, world, message):
    recipe = people(*words)
    with pytest.raises(UserError, match=message):
        Plan.make(recipe, stand_in(recipe), world, 0)


def test_of_a_task_that_compares_nothing_with_other_processes_blocks_stay_whole():
    recipe = people()
    recipe.task = SimpleNamespace()
    with pytest.raises(UserError, match="compared on their own process"):
        Plan.make(recipe, stand_in(recipe), 2, 0)


def test_smaller_micro_batches_have_the_share_of_the_processes_that_train():
    plan = halved(plans(classified("train.batch_size=32"), 2)[1])
    assert (plan.micro_batch, plan.accumulation, plan.share) == (8, 2, 16)
