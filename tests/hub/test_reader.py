"""Checkpoints read from disk: every type and form, a part at a time, and what is wrong with one said by name."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshwright.errors import UserError
from meshwright.hub import tensor_file
from meshwright.hub.reader import open_checkpoint, read_config

RANDOM = np.random.default_rng(0)
TENSORS = {
    "a.weight": RANDOM.standard_normal((7, 5)).astype(np.float32),
    "b.weight": RANDOM.standard_normal((3, 4, 6)).astype(ml_dtypes.bfloat16),
    "c.bias": RANDOM.standard_normal(9).astype(np.float16),
    "d.scale": np.array(2.5, np.float64),
    "e.count": np.array([1, 2], np.int64),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_every_type_of_number_is_read_as_float32(folder):
    checkpoint = open_checkpoint(f"hf:{folder}")
    assert checkpoint.config == read_config(f"hf:{folder}") == {"model_type": "llama"}
    assert sorted(checkpoint.names) == sorted(TENSORS)
    for name in ("a.weight", "b.weight", "c.bias", "d.scale"):
        values = checkpoint.read(name)
        assert values.dtype == np.float32
        assert checkpoint.shape(name) == values.shape == TENSORS[name].shape
        np.testing.assert_array_equal(values, TENSORS[name].astype(np.float32))
    with pytest.raises(UserError, match=r"e\.count is of type I64"):
        checkpoint.read("e.count")


def test_a_part_is_read_without_the_rest(folder, monkeypatch):
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 30)  # so that parts are read in several pieces
    read = []
    fill = tensor_file._fill
    monkeypatch.setattr(tensor_file, "_fill", lambda file, piece: (read.append(len(piece)), fill(file, piece)))
    checkpoint = open_checkpoint(f"hf:{folder}")
    rows = checkpoint.read("a.weight", (slice(2, 4),))
    np.testing.assert_array_equal(rows, TENSORS["a.weight"][2:4])
    assert sum(read) == rows.nbytes
    columns = checkpoint.read("a.weight", (slice(0, 7), slice(1, 3)))
    np.testing.assert_array_equal(columns, TENSORS["a.weight"][:, 1:3])
    inner = checkpoint.read("b.weight", (slice(1, 3), slice(0, 4), slice(2, 5)))
    np.testing.assert_array_equal(inner, TENSORS["b.weight"][1:3, :, 2:5].astype(np.float32))
    assert checkpoint.read("a.weight", (slice(3, 3),)).shape == (0, 5)


def shard(folder):
    names = sorted(TENSORS)
    (folder / "model.safetensors").unlink()
    save_file({name: TENSORS[name] for name in names[:2]}, folder / "one.safetensors")
    save_file({name: TENSORS[name] for name in names[2:]}, folder / "two.safetensors")
    places = {name: "one.safetensors" if name in names[:2] else "two.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards_are_one_checkpoint(folder):
    shard(folder)
    checkpoint = open_checkpoint(f"hf:{folder}")
    assert sorted(checkpoint.names) == sorted(TENSORS)
    np.testing.assert_array_equal(checkpoint.read("c.bias"), TENSORS["c.bias"].astype(np.float32))
    (folder / "two.safetensors").unlink()
    with pytest.raises(UserError, match=r"two\.safetensors: missing"):
        open_checkpoint(f"hf:{folder}")


def test_a_tensor_that_its_shard_lacks_is_named(folder):
    shard(folder)
    save_file({"d.scale": TENSORS["d.scale"]}, folder / "two.safetensors")
    with pytest.raises(UserError, match=r"two\.safetensors: lacks c\.bias"):
        open_checkpoint(f"hf:{folder}")


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FAULTS = {
    "no such file": lambda folder: (folder / "config.json").unlink(),
    "not valid JSON": lambda folder: (folder / "config.json").write_text("{"),
    "must hold an object": lambda folder: (folder / "config.json").write_text("[]"),
    "pickled tensors aren't read": pickled,
    "holds neither": lambda folder: (folder / "model.safetensors").unlink(),
    "ends at byte": cut_short,
    "not a safetensors file": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 7),
    "header is broken": lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{]   "),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_checkpoint_that_is_not_whole_is_refused(folder, message):
    FAULTS[message](folder)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(f"hf:{folder}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "", "a/b/c"])
def test_no_such_folder(name):
    with pytest.raises(UserError, match="no such folder"):
        read_config(f"hf:{name}")


def test_a_name_that_the_hub_does_not_give(monkeypatch):
    import huggingface_hub

    class RepositoryNotFoundError(Exception):
        pass

    class GatedRepoError(RepositoryNotFoundError):
        pass

    for error, said in (
        (ConnectionError("no route\nto it"), r"the hub gave none \(ConnectionError: no route\); give a folder"),
        (OSError(), r"the hub gave none \(OSError\); give a folder"),
        (RepositoryNotFoundError("404"), r"the hub has none of that name that you may see; .*hf auth login"),
        (GatedRepoError("403"), r"is gated; accept its terms on its page of the hub, then log in \(`hf auth login`\)"),
    ):

        def fail(name, allow_patterns, error=error):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=rf"model.init = 'hf:someone/model': .*{said}"):
            open_checkpoint("hf:someone/model")


def test_a_name_on_the_hub_is_fetched_without_pickles(folder, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(allow_patterns) or str(folder)
    )
    assert read_config("hf:someone/model") == {"model_type": "llama"}
    assert "c.bias" in open_checkpoint("hf:someone/model").names
    assert asked[0] == ["config.json"]
    assert not any(pattern.endswith((".bin", "*")) for pattern in asked[1])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_what_is_written_opens_elsewhere(tmp_path, dtype):
    tensors = {name: TENSORS[name].astype(np.float32) for name in ("a.weight", "c.bias", "d.scale")}
    tensor_file.write_file(tmp_path / "x", {n: t.shape for n, t in tensors.items()}, dtype, tensors.items())
    theirs = load_file(tmp_path / "x")
    assert theirs.keys() == tensors.keys()
    for name, values in tensors.items():
        assert theirs[name].dtype == tensor_file.DTYPES[dtype]
        np.testing.assert_array_equal(theirs[name], values.astype(tensor_file.DTYPES[dtype]))
