"""Whatever is wrong with a run is found before anything is begun, and told under its own name."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.hosts.place import hosts_of
from diloco_learner.preflight import checks, machine
from diloco_learner.preflight.checks import OF_ITS_RUN, REMEDIES, check
from diloco_learner.preflight.findings import CHECKS, NEEDS, Finding, read
from diloco_learner.preflight.machine import Machine
from diloco_shared.budget import known
from diloco_shared.budget.memory import device, learner
from diloco_shared.hf.resolving import resolved
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.run import RunSpec

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"
Tables = dict[str, Any]
Change = Callable[[Path, Tables], object]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CorpusCache:
    """Text is prepared once for all tests."""
    return CorpusCache(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def tables(spec: RunSpec) -> Tables:
    """Of a run that is right, to be changed."""
    return spec.model_dump(mode="json")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where relative paths begin, and where models of one's own are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def findings(tables: Tables, root: Path, cache: CorpusCache) -> dict[str, Finding]:
    spec = RunSpec.model_validate(tables)
    return {f.name: f for f in check(spec, root, cache, now=time.monotonic)}


@pytest.mark.whole
def test_a_run_that_is_right_passes_every_check(
    tables: Tables, root: Path, cache: CorpusCache
) -> None:
    begun: list[str] = []
    spec = RunSpec.model_validate(tables)
    found = list(check(spec, root, cache, now=time.monotonic, begins=begun.append))
    assert [f.name for f in found] == list(CHECKS) == begun
    assert all(f.ok and f.text and not f.remedy for f in found), found
    step = found[-1]
    assert "in fp32" in step.text and 0 < step.figures["loss"] < 10
    per_s = spec.tokens_per_step / step.figures["seconds"]
    assert step.figures["tokens_per_s"] == pytest.approx(per_s)
    assert found[CHECKS.index("compile")].figures["seconds"] > 0


@pytest.mark.whole
def test_a_run_from_a_checkpoint_passes_and_begins_with_its_weights(
    tables: Tables, root: Path, cache: CorpusCache
) -> None:
    shutil.copytree(GOLDEN / "qwen3", root / "qwen3")
    tables["model"] = resolved({"weights": "qwen3", "context_tokens": 8}, root)
    np.arange(2000, dtype=np.uint16).__mod__(40).tofile(root / "tokens.bin")
    beside = {"dtype": "uint16", "vocabulary": 40, "end_of_document": 0}
    (root / "tokens.json").write_text(json.dumps(beside))
    tables["data"] |= {"source": "tokens.bin", "virtual_shards": 2}
    found = findings(tables, root, cache)
    assert all(f.ok for f in found.values()), found
    assert found["weights"].text.endswith(tables["model"]["weights_digest"])


def test_tokens_that_the_weights_do_not_know_are_no_corpus_for_them(
    tables: Tables, root: Path, cache: CorpusCache
) -> None:
    shutil.copytree(GOLDEN / "qwen3", root / "qwen3")
    (root / "qwen3" / "tokenizer.json").write_text('{"of": "somebody else"}')
    tables["model"] = {"weights": "qwen3", "overrides": {"vocabulary": 256}}
    found = findings(tables, root, cache)["vocabulary"]
    assert not found.ok and "come with another one (tokenizer.json)" in found.text
    assert "let data.tokenizer name the folder of the weights" in found.remedy


def test_no_tokenizer_is_named_that_is_not_there(
    tables: Tables, root: Path, cache: CorpusCache
) -> None:
    """A run-wide checkpoint has none beside it, and its vocabulary cannot be set."""
    tables["model"]["overrides"]["vocabulary"] = 200
    for weights, words, remedy in (
        ("checkpoint:first.a/000001", "the tokenizer of the run that the checkpoint", OF_ITS_RUN),
        ("nowhere", "the tokenizer that lies beside them", REMEDIES["vocabulary"]),
        ("", "model.overrides.vocabulary (200) is too small", REMEDIES["vocabulary"]),
    ):
        tables["model"]["weights"] = weights
        found = findings(tables, root, cache)["vocabulary"]
        assert not found.ok and words in found.text and found.remedy == remedy


# --------------------------------------------------------------------------------------------------
# Models of one's own. Each test has a module of its own name.

SOUND = """\
import jax
import jax.numpy as jnp


class Own:
    def init(self, key):
        return {"embed": 0.02 * jax.random.normal(key, (256, 256))}

    def loss(self, params, tokens_BxL1):
        logits = params["embed"][tokens_BxL1[:, :-1]]
        rows = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(rows, tokens_BxL1[:, 1:, None], 2))


def factory(config):
    return Own()
"""


def own(number: int, old: str = "", new: str = "", **settings: Any) -> Change:
    """A model of one's own with one part of it replaced; an empty part: all of it."""

    def change(root: Path, tables: Tables) -> None:
        name = f"preflight_model_{number}"
        assert old in SOUND
        (root / f"{name}.py").write_text(SOUND.replace(old, new) if old else new or SOUND)
        tables["model"] = {"factory": f"{name}:factory", "context_tokens": 8}
        tables["algorithm"] |= settings

    return change


def named(factory: str) -> Change:
    return lambda root, tables: tables.update(model={"factory": factory, "context_tokens": 8})


def kept_apart(root: Path, tables: Tables) -> None:
    own(15)(root, tables)
    tables["data"]["documents"] = "apart"


LINE = r"preflight_model_\d+\.py:"
MODELS = [
    (named("nobody_has_this:factory"), "No module named 'nobody_has_this'"),
    (named("json:factory"), "module 'json' has no attribute 'factory'"),
    (own(1, new="def factory(config:\n    pass\n"), rf"SyntaxError: .*{LINE}1\)"),
    (own(2, new="import nobody_has_this\n"), rf"No module named 'nobody_has_this' .*{LINE}1\)"),
    (own(3, new="\n\n1 / 0\n"), rf"ZeroDivisionError: division by zero \(raised at .*{LINE}3\)"),
    (own(4, "Own()\n", "{}['width']\n"), rf"KeyError: 'width' \(raised at .*{LINE}16\)"),
    (own(5, "Own()\n", "object()\n"), r"gave an object without init\(\)"),
    (own(6, "def loss", "def losses"), r"gave an object without loss\(\)"),
    (own(7, "(256, 256)", "(256, width)"), rf"NameError: name 'width'.*{LINE}7\)"),
    (own(8, "(256, 256)", "(256, 256), jnp.bfloat16"), "embed of type bfloat16"),
    (own(9, "(256, 256)", "(0, 256)"), "tensors without values: embed"),
    (own(10, "-jnp.mean(", "-("), r"loss\(\) must return one number.* shape \(2, 8, 1\)"),
    (own(11, "(logits)", "(logits @ jnp.ones((3, 3)))"), rf"TypeError: .*{LINE}11\)"),
    (own(12, "rows, tokens", "rows, own_tokens"), rf"NameError: .*own_tokens.*{LINE}12\)"),
    (own(13, "    return Own()", "    raise SystemExit('no licence')"), "SystemExit: no licence"),
    (
        own(14, fragments=300, sync_every_steps=300),
        "cannot fill 300 fragments: set algorithm.fragments lower",
    ),
    (kept_apart, "data.documents = 'apart' is for the built-in models"),
]


# --------------------------------------------------------------------------------------------------
# Checkpoints.


def begun_from(change: Callable[[Path], object], model: str = "llama", **settings: Any) -> Change:
    """A run that begins from a checkpoint, which is another one since."""

    def begin(root: Path, tables: Tables) -> None:
        shutil.copytree(GOLDEN / model, root / "w")
        tables["model"] = resolved({"weights": "w", "context_tokens": 8}, root) | settings
        change(root / "w")

    return begin


def weighted(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def replaced(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(GOLDEN / "mistral", folder)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.norm.weight"
CHECKPOINTS: list[tuple[Change, str]] = [
    (begun_from(shutil.rmtree), "there is no such folder"),
    (begun_from(lambda f: (f / "config.json").unlink()), "config.json: No such file"),
    (begun_from(lambda f: cut_off(f / "model.safetensors")), "not a sound safetensors file"),
    (begun_from(weighted(lambda t: t.pop(NORM))), f"there is no tensor {NORM}"),
    (begun_from(weighted(lambda t: t.update({NORM: t[NORM].astype(np.int8)}))), "of type I8"),
    (begun_from(weighted(lambda t: t.update({NORM: t[NORM] + 1}))), "holds other weights than"),
    (begun_from(replaced), "another shape: .*window is 5 there, and 0 in the run"),
]


# --------------------------------------------------------------------------------------------------
# Tokenizers and corpora.


def data(make: Callable[[Path], object] = lambda root: None, **settings: Any) -> Change:
    def change(root: Path, tables: Tables) -> None:
        make(root)
        tables["data"] |= settings

    return change


def file(name: str, text: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(text)


def endless(root: Path) -> None:
    """A tokenizer of two words, neither of which ends a document."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (root / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))


TOKENIZERS: list[tuple[Change, str]] = [
    (data(tokenizer="./none.json"), "neither 'bytes' nor a file or folder on this machine"),
    (data(file("t.json", "{"), tokenizer="./t.json"), "is no tokenizer of Hugging Face"),
    (data(lambda r: (r / "t").mkdir(), tokenizer="./t"), "is no tokenizer: it has no tokenizer.j"),
    (data(endless, tokenizer="./tokenizer.json"), "no token that ends a document"),
    (data(file("t.model", "text"), tokenizer="./t.model"), "no model of SentencePiece"),
]


def corpus(change: Callable[[Path], object] = lambda folder: None) -> Callable[[Path], None]:
    """A prepared corpus of bytes at `c`, changed."""

    def make(root: Path) -> None:
        prepared(folder_of(root / "text", 60, words=50), root / "c")
        change(root / "c")

    return make


def indexed(**changed: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        index = folder / "index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | changed))

    return change


def tokens(root: Path, last: int = 1) -> None:
    """Numbers below 200, but for the last ones."""
    numbers = np.arange(5000, dtype=np.uint16) % 200
    numbers[-600:] = last
    numbers.tofile(root / "t.bin")


def silent(root: Path) -> None:
    """What ends a document is not said."""
    tokens(root)
    (root / "t.json").write_text('{"dtype": "uint16", "vocabulary": 200}')


ANOTHER = "0" * 32
MIXED = [{"source": "c", "weight": 1.0}, {"source": "none", "weight": 1.0}]
CORPORA: list[tuple[Change, str]] = [
    (data(source="none"), "source 'none' is neither a folder nor a file on this machine"),
    (data(lambda r: (r / "e").mkdir(), source="e"), "source 'e' has no files"),
    (data(file("one.txt", "hi"), source="one.txt"), "1 different documents cannot be split"),
    (data(corpus(), source="c", digest=ANOTHER), f"has digest .* and the run wants {ANOTHER}"),
    (data(corpus(indexed(format=9)), source="c"), "is of format 9"),
    (data(corpus(indexed(vocabulary=-1)), source="c"), "is damaged: vocabulary"),
    (data(corpus(lambda c: cut_off(c / "train-00000.bin")), source="c"), "shorter than when it"),
    (data(corpus(lambda c: (c / "test-00000.bin").unlink()), source="c"), "cannot be read"),
    (data(corpus(), mixture=MIXED), "source 'none' is neither a folder nor"),
    (data(file("t.npy", "text"), source="t.npy"), "t.npy is no array of numpy"),
    (data(silent, source="t.bin", documents="apart"), "does not say which it is: write .*t.json"),
]


def small(root: Path, tables: Tables) -> None:
    tables["model"]["overrides"]["vocabulary"] = 200


def said(root: Path) -> None:
    tokens(root, last=250)
    (root / "t.json").write_text('{"dtype": "uint16", "vocabulary": 200, "end_of_document": 0}')


def long(root: Path, tables: Tables) -> None:
    tables["model"]["context_tokens"] = 100_000
    tables["data"]["virtual_shards"] = 1


def many(root: Path, tables: Tables) -> None:
    tables["model"]["context_tokens"] = 512
    tables["data"]["virtual_shards"] = 8_000


SEQUENCES: list[tuple[Change, str]] = [
    (many, "training tokens are too few for 8000 shards"),
    (long, "validation: the held-out split has .* tokens, a sequence 100001"),
    (data(said, source="t.bin"), "has the number 250, which is no token: there are 200"),
]

WRONG = [
    *(("model", change, words) for change, words in MODELS),
    *(("weights", change, words) for change, words in CHECKPOINTS),
    *(("tokenizer", change, words) for change, words in TOKENIZERS),
    *(("corpus", change, words) for change, words in CORPORA),
    ("vocabulary", small, "is too small for this corpus, which has 256 different tokens"),
    *(("sequences", change, words) for change, words in SEQUENCES),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_what_is_wrong_is_found_by_name_before_anything_is_begun(
    name: str, change: Change, words: str, tables: Tables, root: Path, cache: CorpusCache
) -> None:
    change(root, tables)
    found = findings(tables, root, cache)
    bad = [f for f in found.values() if f.verdict == "WRONG"]
    assert name in [f.name for f in bad], found
    finding = found[name]
    assert re.search(words, finding.text), finding.text
    assert finding.remedy and "Traceback" not in finding.text and "\n" not in finding.text
    # Nothing is compiled; and what does not depend on it is looked at all the same.
    assert found["compile"].skipped and found["step"].skipped
    for other in found.values():
        roots = {f.name for f in bad}
        assert other.ok or other.name in roots or any(r in other.text for r in roots)


def test_the_wrong_runs_are_many_and_each_kind_is_there() -> None:
    assert len(WRONG) >= 40
    assert {name for name, _, _ in WRONG} == {
        "model", "weights", "tokenizer", "corpus", "vocabulary", "sequences",
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The machine.

MACHINE = Machine("gpu", "H100", 1, 1 << 36, 1 << 36, 1 << 36)


@pytest.mark.parametrize(
    ("there", "name", "words", "remedy"),
    [
        ({"device_bytes": 1000}, "device memory", "of the device, and 1 kB are free", "budget"),
        ({"host_bytes": 10}, "host memory", "of this machine's memory, and 10 B", "make room"),
        ({"disk_bytes": 10}, "disk", "of the disk of .*, and 10 B are free", "keeping.checkpoints"),
    ],
)
def test_a_machine_that_is_too_small_is_found_before_anything_is_begun(
    there: dict[str, int],
    name: str,
    words: str,
    remedy: str,
    tables: Tables,
    root: Path,
    cache: CorpusCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "machine_of", lambda _: dataclasses.replace(MACHINE, **there))
    found = findings(tables, root, cache)
    assert [f.name for f in found.values() if f.verdict == "WRONG"] == [name]
    assert re.search(words, found[name].text) and remedy in found[name].remedy
    assert found["compile"].skipped
    assert found["devices"].text == "1 x H100"


def test_a_device_with_a_kernel_for_attention_needs_no_room_for_its_weights(
    tables: Tables, root: Path, cache: CorpusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables["model"] = {"context_tokens": 8}  # nano's heads
    need = {}
    for kernel in (False, True):
        there = dataclasses.replace(MACHINE, kernel=kernel)
        monkeypatch.setattr(checks, "machine_of", lambda _, there=there: there)
        need[kernel] = findings(tables, root, cache)["device memory"].figures["needed_bytes"]
    assert need[True] < need[False]


def test_where_hosts_keep_their_checkpoints_there_must_be_the_room(
    tables: Tables, root: Path, cache: CorpusCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = dataclasses.replace(MACHINE, platform="cpu", disk_bytes=10)
    monkeypatch.setattr(checks, "machine_of", lambda _: full)
    place, free = tmp_path / "shared", {"bytes": 10}
    monkeypatch.setattr(checks, "free_on", lambda folder: folder == place and free["bytes"])
    spec = RunSpec.model_validate(tables)

    def disk(kept_at: str) -> Finding:
        made = check(spec, root, cache, now=time.monotonic, kept_at=kept_at)
        return next(finding for finding in made if finding.name == "disk")

    assert f"of the disk of {place}, and 10 B are free" in disk(str(place)).text
    free["bytes"] = 1 << 40
    assert disk(str(place)).ok and not disk("").ok
    bucket = disk("gs://bucket/folder")
    assert bucket.ok and "gs://bucket/folder does not tell" in bucket.text


@pytest.mark.parametrize(
    ("mesh", "ok", "words"),
    [
        (MeshSizes(), True, "8 x H100, of which one computes; 7 of 8 devices idle"),
        (MeshSizes(fsdp=16), False, "takes 16 devices, and this process has 8"),
        (MeshSizes(fsdp=4), False, "inner.batch_sequences = 2 cannot be spread evenly over 4"),
    ],
)
def test_how_devices_share_the_work_is_told_or_refused(
    mesh: MeshSizes,
    ok: bool,
    words: str,
    spec: RunSpec,
    root: Path,
    cache: CorpusCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "machine_of", lambda _: dataclasses.replace(MACHINE, devices=8))
    found = next(check(spec, root, cache, now=time.monotonic, mesh=mesh))
    assert found.name == "devices" and found.ok == ok and words in found.text
    assert bool(found.remedy) != ok


def test_an_island_of_several_hosts_is_checked_as_a_whole(
    tables: Tables, root: Path, cache: CorpusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the devices, with all of the state, would not do for any large model."""
    monkeypatch.setattr(checks, "machine_of", lambda _: dataclasses.replace(MACHINE, devices=8))
    tables["inner"]["batch_sequences"] = 32
    spec = RunSpec.model_validate(tables)
    made = check(spec, root, cache, now=time.monotonic, hosts=lambda: 4)
    found = {finding.name: finding for finding in made}
    assert not [f for f in found.values() if f.verdict == "WRONG"], found
    assert found["devices"].figures == {"devices": 32, "used": 32}
    assert "4 hosts of 8 x H100 each, if the others" in found["devices"].text
    job = known(spec, parameters=int(found["model"].figures["parameters"]))
    assert job is not None
    needed = {
        name: found[name].figures["needed_bytes"] for name in ("device memory", "host memory")
    }
    assert needed == {
        "device memory": device(job, mesh=MeshSizes(fsdp=32)).bytes,
        "host memory": learner(job, 4).bytes,
    }
    # What would take the other hosts is told, and is no fault.
    for name in ("compile", "step"):
        assert found[name].skipped and found[name].text.startswith("not tried: the 4 hosts")


def test_on_a_host_without_an_accelerator_its_own_devices_take_its_memory(
    tables: Tables, root: Path, cache: CorpusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Machine("cpu", "cpu", 2, None, 1 << 50, 1 << 50)
    monkeypatch.setattr(checks, "machine_of", lambda _: alone)
    tables["inner"]["batch_sequences"] = 4
    spec = RunSpec.model_validate(tables)
    made = check(spec, root, cache, now=time.monotonic, hosts=lambda: 2)
    found = {finding.name: finding for finding in made}
    job = known(spec, parameters=int(found["model"].figures["parameters"]))
    assert job is not None
    on_device = device(job, on_cpu=True, mesh=MeshSizes(fsdp=4)).bytes
    needed = found["host memory"].figures["needed_bytes"]
    assert needed == learner(job, 2).bytes + 2 * on_device


@pytest.mark.parametrize(
    ("hosts", "mesh", "name", "words"),
    [
        ("2", MeshSizes(fsdp=8), "devices", "takes 8 of the 16 devices of this island's hosts"),
        ("slurm", None, "devices", "or give DILOCO_HOSTS a number"),
        ("2", MeshSizes(fsdp=8, tensor=2), "model", "tensor=2 needs a model that says which"),
    ],
)
def test_what_all_hosts_cannot_do_is_found_on_one_of_them(
    hosts: str,
    mesh: MeshSizes | None,
    name: str,
    words: str,
    tables: Tables,
    root: Path,
    cache: CorpusCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "machine_of", lambda _: dataclasses.replace(MACHINE, devices=8))
    own(16)(root, tables)
    tables["inner"]["batch_sequences"] = 8
    spec, count = RunSpec.model_validate(tables), partial(hosts_of, hosts, {})
    made = check(spec, root, cache, now=time.monotonic, mesh=mesh, hosts=count)
    bad = [finding for finding in made if finding.verdict == "WRONG"]
    assert [finding.name for finding in bad] == [name]
    assert words in bad[0].text and bad[0].remedy


def test_a_machine_without_a_device_has_its_text_looked_at_all_the_same(
    tables: Tables, root: Path, cache: CorpusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: Path) -> Machine:
        raise RuntimeError("no device")

    monkeypatch.setattr(checks, "machine_of", none)
    found = findings(tables, root, cache)
    assert "RuntimeError: no device" in found["devices"].text and found["devices"].remedy
    assert found["model"].skipped and found["model"].text.endswith("devices")
    assert found["sequences"].ok and found["host memory"].skipped


def test_without_an_accelerator_the_devices_part_counts_as_memory_of_the_host(
    tables: Tables, root: Path, cache: CorpusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = {}
    for platform in ("cpu", "gpu"):
        small = Machine(platform, platform, 1, None, 1, 1 << 36)
        monkeypatch.setattr(checks, "machine_of", lambda _, small=small: small)
        need[platform] = findings(tables, root, cache)["host memory"].text
    assert need["cpu"] != need["gpu"]


def test_what_a_container_may_take_is_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/box\n")
    (tmp_path / "box").mkdir()
    for folder, limit in ((tmp_path / "box", "5000"), (tmp_path, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("3000\n")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "own")
    assert machine.machine_of(tmp_path).host_bytes == 2000
    assert not machine.machine_of(tmp_path).kernel, "tests run on processors"
    # Of files that were read the system lets go: they are no more than a cache.
    (tmp_path / "box" / "memory.stat").write_text("anon 900\ninactive_file 1500\nactive_file 600\n")
    assert machine.machine_of(tmp_path).host_bytes == 4100
    (tmp_path / "box" / "memory.stat").write_text("inactive_file 150000\n")
    assert machine.machine_of(tmp_path).host_bytes == 5000


# --------------------------------------------------------------------------------------------------
# One step.


@pytest.mark.whole
@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (own(20, "-jnp.mean(", "jnp.log(-1.0) * jnp.mean("), "step", "not a finite number"),
        (own(21, "0.02 * jax", "jnp.inf * jax"), "step", "not a finite number"),
    ],
)
def test_a_step_that_would_count_for_nothing_is_found(
    change: Change, name: str, words: str, tables: Tables, root: Path, cache: CorpusCache
) -> None:
    change(root, tables)
    found = findings(tables, root, cache)
    assert [f.name for f in found.values() if f.verdict == "WRONG"] == [name], found
    assert words in found[name].text and found[name].remedy


def test_checks_need_only_earlier_ones_and_a_finding_can_be_sent() -> None:
    for number, (name, needs) in enumerate(NEEDS.items()):
        assert set(needs) <= set(CHECKS[:number]), name
    finding = Finding("disk", False, "too small", "make room", figures={"free_bytes": 3.0})
    assert read(json.loads(json.dumps(finding.view()))) == finding
