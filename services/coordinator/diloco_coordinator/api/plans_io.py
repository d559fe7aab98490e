"""/v1/plan: settings for hardware and links that one may not have yet; GET tells what to ask."""

import asyncio
from typing import Any

from fastapi import APIRouter

from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.problems_io import Problem
from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import Infeasible, plan, sensitivity


class Plans:
    """The routes; they depend on nothing that runs."""

    def __init__(self, guard: Guard) -> None:
        self.router = APIRouter(prefix="/v1/plan", tags=["plan"])
        self.router.add_api_route("", self.wishes, methods=["GET"], **guard.look)
        self.router.add_api_route("", self.show, methods=["POST"], **guard.look)

    async def wishes(self) -> dict[str, Any]:
        """What a plan may be asked for: a JSON schema, with meanings and defaults."""
        return PlanRequest.model_json_schema()

    async def show(self, wishes: PlanRequest) -> dict[str, Any]:
        """Settings with their reasons, predictions, and plans for other circumstances.

        422 names the faults of a wish, or says what is short where no settings do.
        """
        try:
            return await asyncio.to_thread(_planned, wishes)
        except Infeasible as error:
            raise Problem(422, "No settings do", str(error)) from None


def _planned(wishes: PlanRequest) -> dict[str, Any]:
    return plan(wishes) | {"sensitivity": sensitivity(wishes)}
