"""Prompt embeddings: bitwise the same from disk, encoded once, whole or absent, and refused where others made them."""

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_t5 import save_pipeline_with_t5
from integration.tiny import ROOT
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

from recast_lightning.errors import UserError
from recast_lightning.paths import EMBEDDED
from recast_lightning.policy import Condition, Policy, PromptEncoder
from recast_lightning.policy.embedding_folder import EmbeddingFolder, encoder_fingerprints
from recast_lightning.policy.families import SD3
from recast_lightning.policy.pipeline_folder import PipelineFolder
from recast_lightning.prompts.prompt import Prompt
from recast_lightning.rollout import RunContext, encode_ahead

TEXTS = ["a red sign", "two blue stars", "a green cross"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return save_pipeline_with_t5(tmp_path_factory.mktemp("t5") / "pipeline")


def loaded(pipeline, **options) -> Policy:
    policy = Policy(str(pipeline), num_steps=2, lora_rank=1, **({"max_sequence_length": 16} | options))
    policy.load()
    return policy


def without_encoders(policy: Policy) -> Policy:
    def load():
        raise AssertionError("the text encoders were loaded")

    policy._helpers["encoder"].load = load
    return policy


def equal(one: Condition, other: Condition) -> bool:
    assert one.tensors.keys() == other.tensors.keys()
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def fingerprints(pipeline: Path) -> dict[str, str]:
    return encoder_fingerprints(pipeline, SD3.text_parts, SD3.text_parts)


def row(seed: int = 0, tokens: int = 4) -> Condition:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embeddings": (1, tokens, 8), "pooled": (1, 8)}
    return Condition({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_from_disk_are_those_of_the_encoders_bitwise(pipeline, tmp_path, dtype):
    direct = loaded(pipeline, dtype=dtype).encode_prompts(TEXTS)
    first = loaded(pipeline, dtype=dtype, embedding_folder=str(tmp_path / "e"))
    first.encode_ahead(TEXTS[:2], lambda _: None)
    first.encode_prompts(TEXTS)  # the third on demand
    again = without_encoders(loaded(pipeline, dtype=dtype, embedding_folder=str(tmp_path / "e")))
    found = again.encode_prompts([*TEXTS, TEXTS[0]])
    assert direct.tensors["embeddings"].dtype == found.tensors["embeddings"].dtype == getattr(torch, dtype)
    assert direct.tensors["embeddings"][:, -16:].abs().sum() > 0  # T5's tokens come last
    assert equal(direct, found[torch.arange(3)])
    assert equal(found[torch.tensor([0])], found[torch.tensor([3])])
    assert len(list((tmp_path / "e").iterdir())) == 3


def test_an_embedding_does_not_depend_on_the_callers_autocast(pipeline):
    direct = loaded(pipeline).encode_prompts(TEXTS[:1])
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(loaded(pipeline).encode_prompts(TEXTS[:1]), direct)


def test_encoders_are_loaded_when_needed_and_freed_after_encoding_ahead(pipeline, tmp_path):
    policy = loaded(pipeline, embedding_folder=str(tmp_path))
    encoder, kept, steps = policy._helpers["encoder"], [], []
    assert encoder.pipeline is None
    load = encoder.load

    def loading():
        pipeline = load()
        kept.extend(weakref.ref(part) for part in (pipeline.text_encoder, pipeline.text_encoder_3))
        return pipeline

    encoder.load = loading
    policy.encode_ahead(TEXTS, steps.append)
    gc.collect()
    assert steps == [0, 1, 1, 1]
    assert len(kept) == 2
    assert all(part() is None for part in kept)
    assert not encoder.cache
    without_encoders(policy).encode_ahead(TEXTS, steps.append)
    assert steps[4:] == [3]


def test_what_is_read_is_mapped_and_what_is_kept_is_bounded(tmp_path):
    folder = EmbeddingFolder(tmp_path, {})
    for i in range(3):
        folder.write(f"{i}", row(i, tokens=2**20))  # 32 MB each
    encoder = PromptEncoder(
        SD3(PipelineFolder.find("signboard:base")), lambda: None, cache_size=2, offload=False, folder=folder
    )
    before = anonymous_memory()
    kept = [folder.read(f"{i}") for i in range(3)]
    assert sum(float(part.tensors["embeddings"][0, -1, -1]) for part in kept) != 0
    assert anonymous_memory() - before < 16e6
    encoder.encode(["0", "1", "2", "0"], torch.device("cpu"))
    assert list(encoder.cache) == ["1", "2"]


def anonymous_memory() -> float:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
    return 1024.0 * int(line.split()[1])


# Other encoders -------------------------------------------------------------------------------------------------


def change_weight(pipeline: Path) -> None:
    file = pipeline / "text_encoder_3/model.safetensors"
    weights = load_file(file)
    weights["encoder.block.0.layer.0.SelfAttention.q.weight"] += 1e-3
    save_file(weights, file, {"format": "pt"})


def change_tokenizer(pipeline: Path) -> None:
    file = pipeline / "tokenizer/tokenizer_config.json"
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (None, {"max_sequence_length": 32}, r"max_sequence_length 16, but this run has max_sequence_length 32"),
        (None, {"dtype": "bfloat16"}, r"dtype float32, but this run has dtype bfloat16"),
        (None, {"use_t5": False}, r"text_encoder_3 \w{16}, but this run has text_encoder_3 none"),
        (change_weight, {}, r"text_encoder_3 \w{16}, but this run has text_encoder_3 \w{16}"),
        (change_tokenizer, {}, r"of tokenizer \w{16}, but"),
    ],
)
def test_embeddings_of_other_encoders_are_refused(pipeline, tmp_path, change, options, named):
    copy = shutil.copytree(pipeline, tmp_path / "pipeline")
    options = {"max_sequence_length": 16, "embedding_folder": str(tmp_path / "e")} | options
    made_by = {"max_sequence_length": "16", "dtype": "float32", **fingerprints(pipeline)}
    EmbeddingFolder(tmp_path / "e", made_by).write(TEXTS[0], row())
    Policy(str(copy), max_sequence_length=16, embedding_folder=str(tmp_path / "e")).validate()
    if change:
        change(copy)
    with pytest.raises(UserError, match=named):
        Policy(str(copy), **options).validate()


def test_a_file_of_other_encoders_that_comes_later_is_refused_too(tmp_path):
    ours = EmbeddingFolder(tmp_path, {"dtype": "float32"})
    EmbeddingFolder(tmp_path, {"dtype": "bfloat16"}).write(TEXTS[0], row())
    with pytest.raises(UserError, match="dtype bfloat16"):
        ours.read(TEXTS[0])


def test_a_fingerprint_is_of_weights_not_of_how_they_are_split(pipeline, tmp_path):
    copy = shutil.copytree(pipeline, tmp_path / "pipeline")
    t5 = T5EncoderModel.from_pretrained(copy / "text_encoder_3")
    (copy / "text_encoder_3/model.safetensors").unlink()
    t5.save_pretrained(copy / "text_encoder_3", max_shard_size="50KB")
    assert len(list((copy / "text_encoder_3").glob("*.safetensors"))) > 1
    assert fingerprints(copy) == fingerprints(pipeline)
    shutil.rmtree(copy / "text_encoder_3")
    (copy / "text_encoder_3").mkdir()
    with pytest.raises(UserError, match=r"text_encoder_3 has no model\.safetensors"):
        fingerprints(copy)


# Bad days -------------------------------------------------------------------------------------------------------


def test_a_file_cut_short_is_encoded_anew(pipeline, tmp_path):
    policy = loaded(pipeline, embedding_folder=str(tmp_path))
    policy.encode_ahead(TEXTS[:1], lambda _: None)
    (file,) = tmp_path.iterdir()
    whole, row = file.read_bytes(), load_file(file)["embeddings"].clone()
    for length in (0, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        policy.encode_ahead(TEXTS[:1], lambda _: None)
        assert torch.equal(load_file(file)["embeddings"], row)


def test_a_process_killed_while_it_writes_leaves_only_whole_files(tmp_path):
    code = (
        "import itertools, torch; from pathlib import Path; from recast_lightning.policy.embedding_folder import *\n"
        f"folder = EmbeddingFolder(Path({str(tmp_path)!r}), {{}})\n"
        "row = Condition({'embeddings': torch.ones(1, 2**21, 8), 'pooled': torch.ones(1, 8)})\n"
        "for i in itertools.cycle(range(4)): folder.write(str(i), row)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("*.safetensors"))) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = EmbeddingFolder(tmp_path, {})
    found = [name for name in map(str, range(4)) if name in folder]
    assert len(found) >= 2
    assert all(folder.read(name) is not None for name in found)


@contextmanager
def largest_file(size: int):
    """As a full disk, for files beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_or_closed_disk_is_one_sentence_and_leaves_nothing_broken(tmp_path):
    folder = EmbeddingFolder(tmp_path / "e", {})
    folder.write("kept", row())
    with largest_file(1000), pytest.raises(UserError, match=r"e' cannot keep an embedding \(File too large\)"):
        folder.write("large", row(tokens=100))
    assert len(list((tmp_path / "e").iterdir())) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot keep an embedding \(.*[Dd]irectory"):
        EmbeddingFolder(tmp_path / "file/e", {}).write("a", row())


# Several processes ----------------------------------------------------------------------------------------------


class Process:
    """One of several processes that encode ahead."""

    def __init__(self, rank: int, world_size: int, fault: Exception | None = None, there: bool = True) -> None:
        failed = 1 if fault else 0  # of all processes
        reduce = lambda fine, operation: torch.tensor(float(world_size - failed))  # noqa: E731
        self.context = RunContext(rank, world_size, reduce=reduce)
        self.encoded: list[str] = []
        self.policy = SimpleNamespace(embedding_folder="e", encode_ahead=self.encode, has_embedding=lambda text: there)
        self.fault = fault if rank == 0 else None

    def encode(self, texts, advance) -> None:
        self.encoded += texts
        if self.fault:
            raise self.fault

    def run(self) -> list[str]:
        encode_ahead(self.policy, [Prompt(text) for text in "abcabd"], self.context)
        return self.encoded


def test_each_prompt_is_encoded_by_one_process_only():
    assert sorted(text for rank in range(3) for text in Process(rank, 3).run()) == list("abcd")


def test_a_process_that_cannot_write_stops_all():
    fault = UserError("no space")
    with pytest.raises(UserError, match="no space"):
        Process(0, 2, fault).run()
    with pytest.raises(UserError, match="Another process could not encode"):
        Process(1, 2, fault).run()
    with pytest.raises(UserError, match="a folder that all nodes share"):
        Process(1, 2, there=False).run()


def test_the_embedded_pipeline_needs_no_t5(tmp_path):
    assert fingerprints(EMBEDDED / "base")["text_encoder_3"] == "none"
    policy = loaded("signboard:base", max_sequence_length=0, embedding_folder=str(tmp_path))
    assert equal(policy.encode_prompts(TEXTS), loaded("signboard:base", max_sequence_length=0).encode_prompts(TEXTS))
