"""What ended a process, said in its log: each fault once, without the groups around it."""

import structlog

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.port import BusError

log = structlog.get_logger()


def leaves(fault: BaseException) -> list[BaseException]:
    """The faults themselves, out of the groups that nested task groups wrap around them."""
    if not isinstance(fault, BaseExceptionGroup):
        return [fault]
    return [leaf for each in fault.exceptions for leaf in leaves(each)]


def tell(fault: BaseException, server: str) -> None:
    """`server`: the address of the message server, as the settings say it."""
    for each in leaves(fault):
        if isinstance(each, BusError):
            log.error("no bus", url=Address(server).shown, error=str(each))
        else:
            log.error("failed, to be started again", error=repr(each), exc_info=each)
