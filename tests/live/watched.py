"""The run `r` as the API shows it, and waiting for what it shall show: whoever started it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from live.processes import PATIENCE_S
from waiting import wait_until

from diloco_client import ApiError, Client, Unreachable

# What a question ends with while those who would answer it are away.
AWAY = (ApiError, Unreachable, OSError, LookupError, TypeError, ValueError)


class Watched:
    """Answers of `client` about the run `r`."""

    client: Client
    patience_s = PATIENCE_S

    def check(self) -> None:
        """Fail where nothing can come any more, as after the end of a process."""

    def wait_until(
        self, condition: Callable[[], Any], what: str, *, patience_s: float | None = None
    ) -> Any:
        """The first true value; whoever does not answer meanwhile is waited for."""
        patience_s = self.patience_s if patience_s is None else patience_s

        def met() -> Any:
            self.check()
            return condition()

        try:
            return wait_until(met, what, patience_s=patience_s, every_s=0.1, tolerated=AWAY)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.seen()}") from None

    def seen(self) -> str:
        """Where the run stands, for whoever has to find out why something never came."""
        try:
            view = self.client.run("r")
        except (*AWAY, AttributeError) as error:  # there is no client before it has started
            return f"the run is not shown: {error!r}"
        syncers = {s["id"]: s["state"] for s in view["syncers"]}
        return f"the run is {view['state']}: {view['reason']}; syncers {syncers}"

    def codes(self) -> list[str]:
        """A word for each sentence of the run's reason."""
        return list(self.client.run("r")["reason_codes"])

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.client.rounds("r"))

    def committed(self) -> list[dict[str, Any]]:
        return [r for r in self.rounds() if r["outcome"] == "committed"]

    def goes_on(self, what: str, more: int = 6) -> None:
        """So many rounds are committed that were not there before."""
        last = self.wait_until(self.rounds, "rounds")[-1]["round"]
        self.wait_until(
            lambda: sum(r["round"] > last for r in self.committed()) >= more,
            f"rounds after {what}",
        )

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.client.run("r")["status"]
        return status

    def learner(self, name: str) -> dict[str, Any]:
        """What the run's status shows of it; nothing as long as it shows nothing."""
        shown: dict[str, Any] = (self.status() or {"learners": {}})["learners"].get(name, {})
        return shown

    def syncers(self) -> dict[str, str]:
        return {s["id"]: s["state"] for s in self.client.run("r")["syncers"]}

    def leader(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "leading"), "")

    def standby(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "standby"), "")

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.client.events("r") if e["kind"] == kind]

    def evaluations(self) -> list[dict[str, Any]]:
        return [e["data"] for e in self.told("evaluation")]

    def end(self) -> None:
        """Stop the run, and wait until everybody has left it."""
        self.client.stop("r")
        self.wait_until(lambda: self.client.run("r")["state"] == "stopped", "the end")

    def clear(self) -> None:
        """End the run, if there is one, and delete it once those who worked for it are gone."""

        def gone() -> bool:
            try:
                self.client.delete_run("r")
            except ApiError as error:
                if error.status == 404:
                    return True
                if error.status != 409:
                    raise
                with suppress(ApiError):
                    self.client.stop("r")
            return False

        self.wait_until(gone, "a run that can be deleted")
