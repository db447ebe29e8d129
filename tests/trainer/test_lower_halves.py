"""Float32 copies in shared memory: weight, lower half and tie give each of them back, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.schema import Config, TrainerConfig
from pipeline.models.critic import Critic
from pipeline.models.weights.versions import PolicyVersions
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.checkpoints import STATE_FILE, save_checkpoint
from pipeline.trainer.learner import Learner
from pipeline.trainer.saving.lower_halves import join, ties_of
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import Progress, progress_of, tensors_of
from tests.support import tiny
from tests.trainer.test_checkpoints import Tokenizer
from tests.trainer.test_learner import experience_of

CPU = torch.device("cpu")
TRAINER = TrainerConfig(warmup_steps=0, decay_steps=0, critic_warmup_steps=0, learning_rate=1e-3, packing=False)
UPPER_HALVES = [
    # 0, subnormal numbers, 1 and its neighbours, the largest numbers, of both signs; even and odd.
    sign << 15 | upper
    for sign in (0, 1)
    for upper in (0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F)
]


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize("shape", [(20, 65_536), (20 * 65_536, 1), (20 * 65_536,), (5, 4, 65_536)])
def test_every_lower_half_comes_back_from_the_weight_to_which_the_copy_was_rounded(shape):
    upper = torch.tensor(UPPER_HALVES, dtype=torch.int64)[:, None]
    words = (upper << 16 | torch.arange(65_536)).to(torch.int32)
    copies = words.view(torch.float32).reshape(shape)
    found = torch.full(shape, -1.0)

    ties = ties_of(copies)
    join(found, copies.bfloat16(), copies.view(torch.int16)[..., ::2], ties)

    assert torch.equal(bits(found), bits(copies))
    assert ties.any(), "ties to both sides are among them"
    assert ties.numel() in (copies.numel(), copies.numel() // 8)


def test_a_width_that_is_no_multiple_of_8_and_rows_in_parts(monkeypatch):
    monkeypatch.setattr("pipeline.trainer.saving.lower_halves._PART_ELEMENTS", 40)
    tie_up, tie_down = 0x3F818000, 0x3F808000
    words = torch.tensor([tie_up, tie_down, 0x3F80FFFF, 0x3F800001, tie_up]).repeat(7, 4)[:, :13].to(torch.int32)
    copies, found = words.contiguous().view(torch.float32), torch.zeros(7, 13)

    ties = ties_of(copies)
    join(found, copies.bfloat16(), copies.view(torch.int16)[..., ::2], ties)

    assert tuple(ties.shape) == (7, 2)
    # Elements 0, 4, 5 and 9, 10 of each row.
    assert ties[3].tolist() == [0b00110001, 0b00000110]
    assert torch.equal(bits(found), bits(copies))


class Rank:
    """A trainer of an actor and a critic in bfloat16, whose value head is float32."""

    def __init__(self, folder, seed):
        actor = tiny.llama(seed).bfloat16()
        self.models = {"actor": actor, "critic": Critic.from_actor(actor)}
        self.learner = Learner(TRAINER, "ppo", **self.models)
        path = folder / "weights"
        connection = SimpleNamespace(
            rank=0, weights_path=path, remote=None, versions=PolicyVersions(path, weight_slots=2)
        )
        self.ranks = RankModels(Config(), self.models, connection, CPU)

    def step(self, seed):
        actor = tiny.llama().bfloat16()
        self.learner.update([experience_of(actor, "ppo", critic=Critic.from_actor(actor), seed=seed)])

    def state(self):
        return tensors_of(self.learner, Progress(self.learner.step, 7, 10))

    def publish(self, version):
        return self.ranks.writing(WeightsVersion(version), self.state())()

    def tensors(self):
        weights = {f"{name}.{key}": t for name, model in self.models.items() for key, t in model.state_dict().items()}
        return {name: tensor.clone() for name, tensor in {**weights, **self.learner.tensors()}.items()}

    def save(self, root, held):
        note = CheckpointNote("", 3, 3, 10, False, "", "", {})

        def write(**parts):
            return save_checkpoint(root, note, tokenizer=Tokenizer(), **parts)

        return self.ranks.save(write, self.state() if held is None else None, held)


@pytest.fixture
def rank(tmp_path):
    rank = Rank(tmp_path, 3)
    for seed in range(3):
        rank.step(seed)
        rank.publish(seed)
    yield rank
    rank.ranks.close()


def test_a_successor_has_each_float32_copy_and_goes_on_to_the_same_bits(rank, tmp_path):
    copies = [tensor for name, tensor in rank.learner.tensors().items() if ".float32." in name]
    assert len(copies) > 20 and any((bits(copy) & 0xFFFF).ne(0).any() for copy in copies)
    successor = Rank(tmp_path, 4)
    state = successor.state()
    newest = successor.ranks.versions.newest()

    assert successor.ranks.restore(newest, state)
    assert progress_of(state) == Progress(3, 7, 10)

    expected, found = rank.tensors(), successor.tensors()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
    successor.learner.step = 3
    rank.step(9)
    successor.step(9)
    expected, found = rank.tensors(), successor.tensors()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
    successor.ranks.close()


def test_shared_memory_holds_of_each_copy_the_bits_that_its_weight_lacks(rank):
    stored = rank.ranks.versions._training.specs
    kinds = {spec.name.split(".")[1] for spec in stored if spec.name.startswith(("actor.", "critic."))}

    assert kinds == {"step", "exp_avg", "exp_avg_sq", "lower", "ties"}, "the value head has no copy"
    of = {kind: sum(spec.nbytes for spec in stored if f".{kind}." in spec.name) for kind in kinds}
    copies = sum(tensor.numel() for name, tensor in rank.learner.tensors().items() if ".float32." in name)
    assert of["lower"] == 2 * copies and copies // 8 <= of["ties"] < copies // 4


def test_a_checkpoint_from_shared_memory_has_the_float32_copies(rank, tmp_path):
    is_held, held = rank.ranks.held(rank.state())
    assert is_held and not held.is_next()
    expected = {name: tensor.clone() for name, tensor in rank.state().items()}
    at_once = rank.save(tmp_path / "live", None)
    rank.step(9)

    beside = rank.save(tmp_path / "held", held)

    found = load_file(beside / STATE_FILE)
    assert found.keys() == expected.keys() == load_file(at_once / STATE_FILE).keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in expected.items()}
    for file in ("model.safetensors", "critic/model.safetensors"):
        assert (beside / file).read_bytes() == (at_once / file).read_bytes()


def test_without_a_version_nothing_is_held_and_the_live_tensors_are_saved(tmp_path):
    rank = Rank(tmp_path, 3)

    assert rank.ranks.held(rank.state()) == (False, None)

    rank.ranks.close()


def test_the_state_that_is_kept_at_the_end_is_restored_too(rank, tmp_path):
    rank.step(9)
    version = rank.ranks.writing(WeightsVersion(3), None)()
    rank.ranks.keep_state(version, rank.state())
    successor = Rank(tmp_path, 4)
    state = successor.state()

    assert successor.ranks.restore(version, state)

    expected, found = rank.tensors(), successor.tensors()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
    successor.ranks.close()
