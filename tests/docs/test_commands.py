"""Every command that a page shows would be taken: nothing is executed, all of it is read."""

from pathlib import Path

import pytest
from docs.others import fault_of
from docs.shell import Unreadable, commands
from docs.shown import PAGES, Shown, shown, variants


def faults_of(text: Shown) -> list[str]:
    found = ((typed, fault_of(typed, whole=text.whole)) for typed in text.typed())
    return [f"{text.page.name}: {' '.join(t.words)}: {fault}" for t, fault in found if fault]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_would_be_taken(page: Path) -> None:
    faults = [fault for text in shown(page) for fault in faults_of(text)]
    assert not faults, "\n".join(faults)


# --------------------------------------------------------------------------------------------------
# That a wrong one would be seen.

WRONG = {
    "diloco token make anna reed": "'reed' is not one of",
    "diloco token make anna": "scopes is missing",
    "diloco token make anna read --expires 3x": "--expires 3x",
    "diloco rounds first --newest 0": "greater than or equal to 1",
    "diloco rounds --newst 3": "--newst",
    "diloco roundz": "no 'diloco roundz'",
    "diloco quorum RUN": "learners is missing",
    "diloco submit one.toml two.toml": "nobody takes two.toml",
    "diloco up --learners many": "valid integer",
    "diloco budget run.toml --rate 5Gbts": "is no rate",
    "diloco model describe 13b": "13b",
    "diloco sim goodput [--method dp|elastics]": "not elastics",
    "diloco members | diloco evnts": "no 'diloco evnts'",
    "until diloco delet a; do sleep 1; done": "no 'diloco delet'",
    'digest=$(diloco checkpoint lst --json | python -c "1")': "no 'diloco checkpoint lst'",
    "sudo -u diloco /opt/diloco/bin/diloco hub init hub --mutual": "--mutual",
    "srun --ntasks=1 bash -c 'set -a; . site.env; exec diloco doctr'": "no 'diloco doctr'",
    "kubectl --namespace diloco exec coordinator-0 -- diloco membrs": "no 'diloco membrs'",
    "kubectl --namespace diloco exec coordinator-1 -- diloco members": "no pod coordinator-1",
    "kubectl apply -k deploy/kubernetes/hubs": "no deploy/kubernetes/hubs",
    "DILOCO_HOST_SILENCE=3 diloco-learner": "DILOCO_HOST_SILENCE",
    "DILOCO_MESH=fspd=8 diloco-learner": "mesh",
    "DILOCO_HOSTS_CARRY=some diloco-learner": "hosts_carry",
    "DILOCO_MESSH=fsdp=8 diloco check run.toml": "DILOCO_MESSH",
    "export DILOCO_LOG_FORMAT=xml": "log_format",
    "export DILOCO_UPLINK=5": "DILOCO_UPLINK",
    "diloco-syncer --id syncer-a": "--id",
    "DILOCO_ID=one diloco-learners": "no program diloco-learners",
    "operator site ad oslo --hub /hub": "no 'diloco site ad'",
    "docker compose -f compose/hub.yaml run --rm -T operator hub ini": "no 'diloco hub ini'",
    "docker compose -f compose/hub.yaml up -d syncer-c": "no service syncer-c",
    "docker compose -f compose/site.yaml up --scale learners=2": "no service learners",
    "docker compose -f compose/sites.yaml up": "no compose/sites.yaml",
    "make demos": "no demos",
    "make sim SEED=1": "does not read SEED",
    "pip install '.[learnr]'": "no extra learnr",
    "python -m diloco_simulator.check --sedes 1": "no --sedes",
    "python bench/gap.py": "no bench/gap.py",
    "systemctl restart diloco-learners@one": "no unit diloco-learners@",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_command_that_nobody_takes_is_found(text: str) -> None:
    (fault,) = faults_of(Shown(PAGES[0], text, whole=True))
    assert WRONG[text] in fault


def test_what_is_named_within_a_line_need_not_be_complete() -> None:
    for text in ("diloco token make", "diloco budget --hosts", "diloco site add --hub hub"):
        assert not faults_of(Shown(PAGES[0], text, whole=False))
    (fault,) = faults_of(Shown(PAGES[0], "diloco quorum RUN", whole=False))
    assert "learners is missing" in fault, "whoever names one argument names all"


def test_every_way_of_typing_a_line_is_tried() -> None:
    assert variants("diloco up [--chaos]") == ["diloco up ", "diloco up --chaos"]
    assert variants("x kill|hang TARGET [--at N | --after S]") == [
        *("x kill TARGET ", "x kill TARGET --at N", "x hang TARGET --after S")
    ]


def test_shell_is_read_as_a_shell_reads_it() -> None:
    text = r"""
as() {  # a function
  export DILOCO_ID=$1 DILOCO_NATS_CREDENTIALS=hub/$1
}
cat > file <<'END'
diloco nothing of this
END
(as one; exec diloco-syncer > log 2>&1) &
A=1 B="2 3" diloco \
  status walk | grep 'and 2'   # not this
for i in a b; do diloco forget "$i" && true; done
"""
    found = commands(text)
    assert [" ".join(typed.words) for typed in found] == [
        *("export", "cat", "as one", "exec diloco-syncer", "diloco-syncer"),
        *("diloco status walk", "grep and 2", "diloco forget $i", "true"),
    ]
    assert found[0].environment == {"DILOCO_ID": "$1", "DILOCO_NATS_CREDENTIALS": "hub/$1"}
    assert found[5].environment == {"A": "1", "B": "2 3"}
    with pytest.raises(Unreadable, match="here-document"):
        commands("cat <<END\nno end")
