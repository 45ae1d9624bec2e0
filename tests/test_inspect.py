"""``r3numba inspect`` on every kind of file, shipped and made, good and corrupt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich", reason="needs the cli extra")
pytest.importorskip("matplotlib", reason="needs the cli extra")

from r3numba.cli import main

DATA = Path(__file__).parent / "data"
BODIES = sorted([*DATA.glob("*.json"), *DATA.glob("*.txt")])


def run(capsys, *arguments):
    status = main(["inspect", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_there_are_bodies():
    assert len(BODIES) == 7


@pytest.mark.parametrize("path", [*BODIES, *sorted(DATA.glob("*.npz"))], ids=lambda path: path.name)
def test_each_recorded_file(path, capsys, tmp_path):
    picture = tmp_path / "load.png"
    status, out, _ = run(capsys, path, "--num-experts", "16", "--plot", picture)
    assert status == 0
    assert "nothing found" in out
    assert "Expert load over 16 experts" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_json_of_the_rollouts(capsys):
    status, out, _ = run(capsys, DATA / "rollouts_fp32.npz", "--json")
    (report,) = json.loads(out)
    assert status == 0
    assert len(report["captures"]) == 16
    assert [capture["name"].rpartition(":r")[2] for capture in report["captures"]] == [str(i) for i in range(16)]
    assert all(capture["coverage"] == 1.0 for capture in report["captures"])
    assert np.array(report["load"]).shape == (4, 16)
    np.testing.assert_allclose(np.sum(report["load"], axis=1), 4.0, atol=1e-4)


def test_a_start_is_part_of_the_coverage(capsys):
    _, out, _ = run(capsys, DATA / "generate_start20.json", "--json")
    (capture,) = json.loads(out)[0]["captures"]
    assert (capture["start"], capture["rows"], capture["tokens"], capture["coverage"]) == (20, 5, 26, 1.0)


def test_npy_safetensors_and_two_shapes(capsys, tmp_path):
    rng = np.random.default_rng(0)
    routes = rng.random((9, 3, 16)).argsort(axis=2)[:, :, :4].astype(np.int16)
    np.save(tmp_path / "one.npy", routes)
    np.save(tmp_path / "many.npy", np.stack([routes, routes[::-1]]))
    np.savez(tmp_path / "other.npz", layers=routes[:, :2])
    files = [tmp_path / "one.npy", tmp_path / "many.npy", tmp_path / "other.npz"]
    numpy_tensors = pytest.importorskip("safetensors.numpy", reason="needs the cli extra")
    numpy_tensors.save_file({"trajectory": routes, "weights": np.zeros(3, np.float32)}, tmp_path / "s.safetensors")
    status, out, _ = run(capsys, *files, tmp_path / "s.safetensors", "--json", "--plot", tmp_path / "x.png")
    reports = json.loads(out)
    assert status == 0
    assert [len(report["captures"]) for report in reports] == [4, 1]


def test_corrupt_captures_are_found_and_named(capsys, tmp_path):
    rng = np.random.default_rng(0)
    routes = rng.random((80, 4, 16)).argsort(axis=2)[:, :, :4].astype(np.int32)
    routes[3] = 0
    routes[:, 0] = 0
    routes[20:60] = routes[20]
    routes[70:72] = -1
    np.save(tmp_path / "bad.npy", routes)
    status, out, _ = run(capsys, tmp_path / "bad.npy", "--json", "--dense-layers", "0")
    (report,) = json.loads(out)
    assert status == 1
    kinds = {finding["kind"]: (finding["count"], finding["token"]) for finding in report["findings"]}
    assert kinds == {"zero": (3, 3), "zero_row": (1, 3), "repeated_row": (1, 20)}
    assert report["captures"][0]["missing"] == 2
    assert report["load"][0] == [0.0] * 16
    status, out, _ = run(capsys, tmp_path / "bad.npy")
    assert status == 1
    assert "layers with zeros in every token" in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "as a response"),
        ("a.json", b'{"choices": []}', "as a response"),
        ("a.npz", None, "holds no integer array"),
        ("a.npy", b"nothing", ""),
    ],
)
def test_files_without_routes(name, content, message, capsys, tmp_path):
    path = tmp_path / name
    if content is None:
        np.savez(path, logits=np.zeros((3, 2, 2)))
    else:
        path.write_bytes(content)
    status, _, error = run(capsys, path)
    assert status == 2
    assert message in error
    assert error.startswith("r3numba inspect:")


def test_a_dense_layer_that_does_not_exist(capsys):
    status, _, error = run(capsys, DATA / "two_turn.npz", "--dense-layers", "4")
    assert status == 2
    assert "need layer numbers from 0 to 3" in error
