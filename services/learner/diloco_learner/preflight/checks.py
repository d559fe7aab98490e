"""The checks themselves: a run is begun on this machine as a learner would, one thing at a time.

    findings = check(spec, root, cache, now=time.monotonic)

Synchronous. Nothing falls over: whatever a model or a file raises becomes a finding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import (
    check_signs,
    check_tokenizer,
    check_vocabulary,
    load,
    place_of,
    separator_of,
)
from diloco_learner.data.shards import Cut, cut_of
from diloco_learner.hosts.place import WrongHosts
from diloco_learner.models import to_named
from diloco_learner.preflight.findings import (
    CHECKS,
    Causes,
    Finding,
    NotHere,
    Wrong,
    origin,
    told,
    untried,
    wrong,
)
from diloco_learner.preflight.machine import Machine, free_on, machine_of, room
from diloco_learner.training.data_parallel import LearnerStream
from diloco_learner.training.evaluate import held_out_of
from diloco_learner.training.mesh import mesh_over, of_all, shape_of
from diloco_learner.training.trainer import InitialWeights, Program, Trainer
from diloco_shared.budget import Job, Need, known
from diloco_shared.budget.memory import device, disks, learner
from diloco_shared.budget.terms import shown
from diloco_shared.corpora.mix import Mixture
from diloco_shared.corpora.prepared import Corpus, is_prepared
from diloco_shared.corpora.sources import STDLIB
from diloco_shared.corpora.splits import SPLITS
from diloco_shared.corpora.token_files import Damaged
from diloco_shared.corpora.tokenizers import BYTES
from diloco_shared.corpora.tokenizers import load as load_tokenizer
from diloco_shared.gpus import gpus_here, unused
from diloco_shared.hf.belonging import weights_folder
from diloco_shared.hf.resolving import weights_of
from diloco_shared.reach.local import Factories, OutOfReach, Root, located
from diloco_shared.spec.mesh import MeshSizes, WrongMesh, fitted, idle
from diloco_shared.spec.run import Model, RunSpec

# What a check gives: what it found in words, and figures of it.
Found = tuple[str, dict[str, float]]


class InitialWeightsOf(Protocol):
    """What a run begins from, of its model and the folder where relative paths begin. `moved` is
    called whenever some more was read, now and by whoever reads the weights."""

    def __call__(
        self, model: Model, root: Root, *, moved: Callable[[], object]
    ) -> InitialWeights | None: ...


REMEDIES = {
    "devices": "look at the driver and at JAX_PLATFORMS; JAX must find a device in this Python",
    "model": "mend the model, or change [model] or algorithm.fragments",
    "weights": "let model.weights name the folder of the checkpoint that the run begins from; a "
    "relative path begins in the data root. Or let it read checkpoint:FOLDER/NUMBER, as 'diloco "
    "checkpoint list' shows it; those are looked for in DILOCO_CHECKPOINTS",
    "tokenizer": "let data.tokenizer name a sound tokenizer on this machine; a relative path "
    "begins in the data root",
    "corpus": "let data.source name a text or a prepared corpus on this machine; a relative path "
    "begins in the data root",
    "vocabulary": "let [model] overrides have a vocabulary for all tokens, or take the corpus that "
    "was made for this model",
    "sequences": "take more text, shorter sequences (model.context_tokens) or fewer shards "
    "(data.virtual_shards), or hold out more of it (data.validation_fraction)",
    "compile": "mend what the model computes: it could be traced, and not be compiled here",
    "step": "look at the model's loss and what it begins with: no step of such a run would count",
}
# Of what runs may not reach here; the finding names the setting.
NOT_ALLOWED = "name what runs may use on this machine, or have that setting changed"
# Of tokens that are others than those of the weights.
OTHER_TOKENIZER = "let data.tokenizer name the folder of the weights, or prepare the corpus with it"
OF_ITS_RUN = "let [data] name the tokenizer, or a corpus, of the run that the checkpoint is of"
# Of a model whose module, or one that it imports, is not found.
NOT_FOUND = (
    "install it, or let it lie where learners are started or in a folder of their PYTHONPATH"
)


def check(
    spec: RunSpec,
    root: Root,
    cache: CorpusCache,
    *,
    now: Callable[[], float],
    begins: Callable[[str], None] = lambda name: None,
    goes_on: Callable[[], None] = lambda: None,
    beginning: InitialWeightsOf = weights_of,
    factories: Factories | None = None,
    mesh: MeshSizes | None = None,
    kept_at: str = "",
    hosts: Callable[[], int] = lambda: 1,
) -> Iterator[Finding]:
    """Every check in turn; one that needs what is wrong is skipped.

    Paths are looked for in `root`; text is prepared into `cache`, on whose disk the learner's own
    files are counted too. `now`: seconds, monotonic. `begins` hears the name of each check before
    it is made, so that one that ends this process is known. `goes_on` is called again and again
    while a corpus is prepared or read, or weights are read, which may take hours. `beginning` opens
    what the run begins from; by default a folder. `factories`: whose modules the run's model may be
    of; by default any. `mesh`: of this learner's devices, None for "auto". `kept_at`: where all
    hosts of an island keep its checkpoints, if they do. `hosts`: how many there are, of which this
    one is checked as if it were the first and the others were like it; WrongHosts where that is not
    known.
    """
    island = _Island(mesh, kept_at, hosts)
    made = _Checks(spec, root, cache, now, goes_on, beginning, factories, island)
    causes = Causes()
    for name in CHECKS:
        if (left_out := causes.skip(name)) is not None:
            yield left_out
            continue
        begins(name)
        finding = _made(name, getattr(made, name.replace(" ", "_")))
        if finding.ok or not finding.skipped:
            causes.take(finding)
        yield finding


def _made(name: str, look: Callable[[], Found]) -> Finding:
    try:
        text, figures = look()
    except Wrong as error:
        return wrong(name, error.text, error.remedy)
    except NotHere as error:
        return untried(name, str(error))
    except (Exception, SystemExit) as error:  # a user's model or data may raise anything
        if isinstance(error, OutOfReach):
            return wrong(name, told(error), NOT_ALLOWED)
        missing = name == "model" and isinstance(origin(error), ImportError)
        return wrong(name, told(error), NOT_FOUND if missing else REMEDIES.get(name, ""))
    return Finding(name, True, text, figures=figures)


@dataclass(frozen=True, slots=True)
class _Island:
    """What a learner computes on and where it keeps checkpoints: see `check`."""

    mesh: MeshSizes | None
    kept_at: str
    hosts: Callable[[], int]


class _Checks:
    """Each method is one check. What a later one needs, an earlier one has left here."""

    machine: Machine
    hosts: int
    sizes: MeshSizes
    mesh: Mesh | AbstractMesh | None
    program: Program
    job: Job
    starting: InitialWeights | None
    corpora: Corpus | Mixture
    separator: int | None
    cut: Cut
    trainer: Trainer

    def __init__(
        self,
        spec: RunSpec,
        root: Root,
        cache: CorpusCache,
        now: Callable[[], float],
        goes_on: Callable[[], None],
        beginning: InitialWeightsOf,
        factories: Factories | None,
        island: _Island,
    ) -> None:
        self.beginning, self.factories, self.goes_on = beginning, factories, goes_on
        self.wanted, self.kept_at, self.count_hosts = island.mesh, island.kept_at, island.hosts
        self.spec, self.root, self.cache, self.now = spec, root, cache, now
        self.sequences_B = spec.inner.batch_sequences * spec.inner.accumulation

    # --- the machine and the model -------------------------------------------------------------

    def devices(self) -> Found:
        """What a learner would compute on."""
        self.machine = m = machine_of(self.cache.folder)
        sequences = self.spec.inner.batch_sequences
        try:
            self.hosts = hosts = self.count_hosts()
            many = hosts * m.devices
            self.sizes = sizes = fitted(self.wanted, many, sequences)
            if hosts > 1:
                of_all(sizes, many, sequences)
        except WrongMesh as error:
            raise Wrong(str(error), "change the one or the other") from None
        except WrongHosts as error:
            raise Wrong(str(error), "set DILOCO_HOSTS as for a learner") from None
        self.mesh = mesh_over(sizes, jax.local_devices()) if hosts == 1 else shape_of(sizes)
        text = f"{m.devices} x {m.device}" if m.device != m.platform else f"{m.devices} x cpu"
        if hosts > 1:
            text = f"{hosts} hosts of {text} each, if the others are like this one"
        if many > 1:
            text += f", as the mesh {sizes}" if sizes.devices > 1 else ", of which one computes"
        if left := idle(sizes, many, sequences):
            text += f"; {left}"
        if why := unused(gpus_here(), m.platform):
            text += f"; {why}"
        return text, {"devices": many, "used": sizes.devices}

    def model(self) -> Found:
        """It can be imported, cut into fragments, and its loss traced; nothing is compiled."""
        if self.spec.model.factory is not None and self.factories is not None:
            self.factories.check(self.spec.model.factory)
        # Which token is between documents the corpus will say; to trace with, any does as well.
        separator = None if self.spec.data.documents == "packed" else 0
        self.program = program = Program.build(self.spec, separator=separator, mesh=self.mesh)
        for name, leaf in to_named(program.shapes).items():
            if leaf.dtype != np.float32:
                raise Wrong(
                    f"init() makes {name} of type {leaf.dtype}, and parameters must be float32",
                    "let init() make float32; loss() may compute in another type",
                )
        program.check_loss()
        n = sum(program.layout.sizes)
        job = known(self.spec, parameters=n)
        assert job is not None
        self.job, said = job, self.spec.model.parameters
        text = (
            f"{n:,} parameters in {len(program.layout.tensors)} tensors, cut into "
            f"{len(program.layout.sizes)} fragments"
        )
        if said is not None and said != n:
            text += f"; model.parameters says {said:,}: correct it, room is made by it"
        if program.warning:
            text += f"; {program.warning}"
        return text, {"parameters": n}

    def device_memory(self) -> Found:
        """Against what the budget says."""
        here = self.machine
        need = device(self.job, on_cpu=self._on_host, kernel=here.kernel, mesh=self.sizes)
        free = self.machine.device_bytes
        if free is None:
            where = "which is this machine's own" if self._on_host else "which it does not tell"
            text = f"{shown(need.bytes)} of the device's memory, {where}"
            return text, {"needed_bytes": need.bytes}
        return room("the device", need, free)

    @property
    def _on_host(self) -> bool:
        return self.machine.platform == "cpu"

    # --- what the run begins from, and what it reads -------------------------------------------

    def weights(self) -> Found:
        """They have the run's shape and digest."""
        self.starting = self.beginning(self.spec.model, self.root, moved=self.goes_on)
        if self.starting is None:
            return f"fresh ones, from seed {self.spec.seed}", {}
        model = self.spec.model
        where = model.weights if model.checkpoint else self._path(model.weights)
        return f"{where}, digest {model.weights_digest}", {}

    def tokenizer(self) -> Found:
        """Of text that is yet to be prepared; a prepared corpus has its own."""
        data = self.spec.data
        there = data.tokenizer != BYTES and self._path(data.tokenizer).exists()
        if not there and all(self._is_prepared(part.source) for part in data.sources):
            return "a prepared corpus has its own", {}
        found = load_tokenizer(data.tokenizer, self.root)
        return f"{data.tokenizer}, {found.vocabulary} tokens, digest {found.digest}", {}

    def corpus(self) -> Found:
        """It can be opened, or prepared, and is the one that the run means."""
        self.corpora = load(self.spec.data, self.root, self.cache, self.goes_on)
        self.separator = separator_of(self.spec.data, self.corpora)
        tokens = sum(len(c.split(name)) for c in self._parts for name in SPLITS)
        names = ", ".join(part.source for part in self.spec.data.sources)
        # Kept, as learners keep it: of a file of tokens all is read, which may take hours.
        digests = " ".join(
            self.cache.digest(corpus, place_of(part.source, self.root), self.goes_on)
            for corpus, part in zip(self._parts, self.spec.data.sources, strict=True)
        )
        text = f"{names}: {tokens:,} tokens, digest {digests}"
        for corpus, part in zip(self._parts, self.spec.data.sources, strict=True):
            if ends := corpus.ends_within:
                text += f"; the text of {part.source} spells the end of a document {ends:,} times"
        return text, {"tokens": tokens}

    def vocabulary(self) -> Found:
        """The model has a row for every token, and it is of the token that the weights mean."""
        try:
            check_tokenizer(self.spec, self.corpora, self.root)
            check_vocabulary(self.spec, self.corpora)
        except ValueError as error:
            raise Wrong(str(error), self._for_tokens()) from None
        many = max(c.rows for c in self._parts)
        if self.spec.model.factory is not None:
            return f"{many} tokens; of a model of your own nobody knows how many it takes", {}
        return f"{many} tokens, and the model has a row for each", {}

    def _for_tokens(self) -> str:
        """What to do about tokens that the model does not know."""
        if self.spec.model.checkpoint:
            return OF_ITS_RUN
        beside = weights_folder(self.spec.model, self.root) is not None
        return OTHER_TOKENIZER if beside else REMEDIES["vocabulary"]

    def sequences(self) -> Found:
        """Of every split at least one, and of training one for each shard."""
        spec, context = self.spec, self.spec.model.context_tokens
        self.cut = cut_of(self.corpora.train, spec.data.virtual_shards, context, spec.seed)
        many = self.cut.sequences
        text = f"{many:,} of {context} tokens to train on, in {self.cut.shards} shards"
        for split in ("validation", "test"):
            try:
                held = held_out_of(spec, self.corpora.split(split))
            except Damaged as error:
                raise Wrong(f"{split}: {error}", "copy or prepare the corpus again") from None
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from None
            text += f"; {split}: {held.told}" if held.names else ""
        return text, {"sequences": many}

    @property
    def _parts(self) -> tuple[Corpus, ...]:
        found = self.corpora
        return found.corpora if isinstance(found, Mixture) else (found,)

    def _path(self, named: str) -> Path:
        return located(named, self.root)

    def _is_prepared(self, source: str) -> bool:
        try:
            return source != STDLIB and is_prepared(self._path(source))
        except OutOfReach:  # the corpus's own check says so
            return False

    # --- room ----------------------------------------------------------------------------------

    def host_memory(self) -> Found:
        """Against what the budget says; without an accelerator the device's is part of it. Of
        several hosts the first one needs most."""
        need = learner(self.job, self.hosts)
        if self._on_host:
            # Each of those that are here has its own part of this memory.
            many = self.sizes.devices // self.hosts
            on_device = device(self.job, on_cpu=True, mesh=self.sizes)
            need = Need(need.what, need.terms + on_device.terms * many, on_device.lower)
        return room("this machine's memory", need, self.machine.host_bytes)

    def disk(self) -> Found:
        """For the learner's checkpoints."""
        need, free = disks(self.job)["learner"], self.machine.disk_bytes
        place: str | Path = self.cache.folder
        if self.kept_at:
            place = self.kept_at
            free = None if "://" in place else free_on(Path(place).absolute())
        if free is None:
            text = f"{shown(need.bytes)}; how much is free {place} does not tell"
            return text, {"needed_bytes": need.bytes}
        return room(f"the disk of {place}", need, free)

    # --- one step ------------------------------------------------------------------------------

    def compile(self) -> Found:
        """The initial parameters, and every program that training needs."""
        if self.hosts > 1:
            raise NotHere(
                f"the {self.hosts} hosts compile for all their devices, and together: at every "
                "start, since they keep no compiled programs"
            )
        assert not isinstance(self.mesh, AbstractMesh), "devices of other hosts"
        self.program = Program.build(self.spec, self.starting, self.separator, self.mesh)
        check_signs(self.spec, self.program.model, self.corpora)
        self.trainer = Trainer(self.program)
        jax.block_until_ready(self.trainer.params)
        began = self.now()
        self.trainer.warm_up(self.sequences_B)
        took_s = self.now() - began
        return f"took {took_s:.3g} s", {"seconds": took_s}

    def step(self) -> Found:
        """One, on real text, as a run would take it."""
        if self.hosts > 1:
            raise NotHere(f"the {self.hosts} hosts take each step together")
        tokens_BxL1: Any = LearnerStream(self.cut, 0, 1).take(self.sequences_B)
        began = self.now()
        loss = float(self.trainer.step(tokens_BxL1, self.spec.inner_rate))
        jax.block_until_ready(self.trainer.params)
        took_s = self.now() - began
        if not np.isfinite(loss):
            raise Wrong("the loss or its gradient is not a finite number", REMEDIES["step"])
        for _ in self.trainer.inner_state_pieces():
            pass  # as a checkpoint takes them, each through the host's memory
        per_s = self.spec.tokens_per_step / max(took_s, 1e-9)
        text = f"loss {loss:.4g} after {took_s:.3g} s: {per_s:,.0f} tokens a second{self._type}"
        figures = {"loss": loss, "seconds": took_s, "tokens_per_s": per_s}
        return text, figures

    @property
    def _type(self) -> str:
        """What a built-in model multiplies in; one's own decides by itself."""
        if self.spec.model.factory is not None:
            return ""
        return ", in fp32" if self._on_host else ", in bf16"
