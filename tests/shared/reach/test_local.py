"""A run opens files below the data roots, and imports modules that are allowed; nothing else."""

import sys
from pathlib import Path

import pytest

from diloco_shared.reach.local import (
    PATH_CHARS_MAX,
    DataRoots,
    Factories,
    OutOfReach,
    located,
    users_factories,
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for folder in ("site/books", "more", "secret", "site-evil"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "secret/key").write_text("secret")
    (tmp_path / "site/leads").symlink_to(tmp_path / "secret")
    (tmp_path / "site/key").symlink_to(tmp_path / "secret/key")
    (tmp_path / "site/inside").symlink_to(tmp_path / "site/books")
    (tmp_path / "site/across").symlink_to(tmp_path / "more")
    (tmp_path / "site/circle").symlink_to(tmp_path / "site/circle")
    return tmp_path


def roots(site: Path) -> DataRoots:
    return DataRoots.of(f"{site}/site, {site}/more")


TRICKS = {
    "a file of the system": "/etc/passwd",
    "up and out": "../secret/key",
    "up within": "books/../books",
    "up in a whole path": "{}/site/../secret/key",
    "one's home": "~/key",
    "somebody's home": "~root/key",
    "a folder that begins alike": "{}/site-evil",
    "the folder above": "{}",
    "a link that leads out": "leads",
    "below a link that leads out": "leads/key",
    "a file that is a link": "key",
    "a process's own": "/proc/self/environ",
    "a zero byte": "books\0/../../secret",
    "too long": "a" * (PATH_CHARS_MAX + 1),
    "a name too long": "a" * 300 + "/../../secret",
}


@pytest.mark.parametrize("name", TRICKS.values(), ids=TRICKS)
def test_no_path_of_a_run_leads_out_of_the_data_roots(name: str, site: Path) -> None:
    with pytest.raises(OutOfReach, match="the path") as refused:
        roots(site).path(name.format(site))
    assert len(str(refused.value)) < 500


def test_what_is_below_a_root_is_found_by_any_name_that_leads_there(site: Path) -> None:
    books = site / "site/books"
    for name in ("books", "./books", "inside", f"{site}/site/books", f"{site}/site//books/."):
        assert roots(site).path(name) == books
    assert roots(site).path("across") == roots(site).path(f"{site}/more") == site / "more"
    # What is not there may be written below a root meanwhile; a strange name is a name.
    for name in ("nowhere/at/all", "%2e%2e/secret", "．．/secret", "a,b?c#d"):
        assert roots(site).path(name) == site / "site" / name


def test_without_a_setting_it_is_the_working_directory(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site / "site")
    assert DataRoots.of("").path("books") == DataRoots.of(".").path("books") == site / "site/books"
    with pytest.raises(OutOfReach):
        DataRoots.of("").path(f"{site}/more")


def test_a_service_that_is_started_in_the_root_of_all_reaches_nothing_by_that(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    for text in ("", ".", "./"):
        with pytest.raises(OutOfReach, match="DILOCO_DATA_ROOT"):
            DataRoots.of(text).path(str(site / "more"))
    assert DataRoots.of("/").path(str(site / "more")) == site / "more"


def test_a_refusal_tells_nothing_of_what_is_outside(site: Path) -> None:
    def said(name: str) -> str:
        with pytest.raises(OutOfReach, match="DILOCO_DATA_ROOT") as refused:
            roots(site).path(f"{site}/{name}")
        return str(refused.value).replace(name, "NAME")

    assert said("secret/key") == said("secret/not")
    with pytest.raises(OutOfReach) as refused:
        roots(site).path("/etc/passwd")
    assert str(site) not in str(refused.value)


def test_own_commands_of_a_user_read_what_the_user_may_read(site: Path) -> None:
    assert located("key", site / "secret").read_text() == "secret"
    assert located(f"{site}/secret/key").read_text() == "secret"
    assert located("~/x") == Path.home() / "x"
    assert located("~nobody-here/x") == Path("~nobody-here/x"), "found nowhere, and no error"
    with pytest.raises(OutOfReach):
        located("key", roots(site))


# --- modules --------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of a user, and installed software below it."""
    work = tmp_path / "work"
    for place in ("", "a_package", "no_init", "env/site-packages"):
        (work / place).mkdir(parents=True, exist_ok=True)
    body = "raise SystemExit('it was executed')\n"
    for file in ("a_module.py", "a_package/__init__.py", "no_init/inner.py"):
        (work / file).write_text(body)
    (work / "env/site-packages/an_installed_one.py").write_text(body)
    monkeypatch.syspath_prepend(str(work / "env/site-packages"))
    monkeypatch.syspath_prepend(str(work))
    return work


def allowed(text: str, factory: str) -> bool:
    try:
        Factories.of(text).check(factory)
    except OutOfReach as error:
        assert "DILOCO_FACTORIES" in str(error)
        return False
    return True


def test_by_default_no_module_is_imported(work: Path) -> None:
    for factory in ("os:system", "a_module:make", "diloco_learner.models:build", "nowhere:make"):
        assert not allowed("", factory)


def test_a_module_is_allowed_with_all_below_it_and_not_what_begins_alike() -> None:
    for factory in ("mine:make", "mine.small:make", "mine.small.very:make", "two.b:f"):
        assert allowed("mine, two.b", factory)
    for factory in ("mineral:make", "yours:make", "two:f", "two.bc:f", "mine_:f", "Mine:f", ":f"):
        assert not allowed("mine, two.b", factory)


def test_a_folder_allows_what_lies_in_it_and_not_what_is_installed_below(work: Path) -> None:
    for factory in ("a_module:make", "a_package.inner:make", "no_init.inner:make"):
        assert allowed(f"{work}/", factory)
        assert "it was executed" not in sys.modules
    for factory in ("os:system", "sys:exit", "json:loads", "jax:jit", "an_installed_one:make"):
        assert not allowed(f"{work}/", factory)
    # A missing module is for its import to tell: somebody may write it meanwhile.
    assert allowed(f"{work}/", "not_yet_written:make")
    assert not allowed(f"{work}/", "__main__:main")


def test_a_module_that_is_imported_already_is_looked_at_too(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "quiet.py").write_text("")
    import quiet  # type: ignore[import-not-found]

    assert allowed(f"{work}/", "quiet:make") and not allowed(f"{work}/env/", "quiet:make")
    monkeypatch.setitem(sys.modules, "quiet", type(sys)("quiet"))
    assert not allowed(f"{work}/", "quiet:make"), "nobody knows where it comes from"
    del quiet


def test_a_star_allows_what_was_allowed_before() -> None:
    assert allowed("*", "os:system")


@pytest.mark.parametrize("text", ["my-models", "a b", "1st", "mine:make", "C:\\models", "a..b"])
def test_an_entry_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="DILOCO_FACTORIES has the entry"):
        Factories.of(text)


def test_on_ones_own_machine_it_is_the_folder_and_pythonpath(work: Path) -> None:
    text = users_factories({"PYTHONPATH": f"{work}/env/site-packages:"}, work)
    assert allowed(text, "a_module:make") and allowed(text, "an_installed_one:make")
    assert not allowed(text, "os:system")
    assert users_factories({"DILOCO_FACTORIES": "mine"}, work) == "mine"
    assert users_factories({"DILOCO_FACTORIES": ""}, work) == ""
    assert users_factories({}, Path("/with,comma")) == ""
