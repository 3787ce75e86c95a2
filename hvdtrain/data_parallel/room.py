"""How much of the state each rank of ZeRO gets, and whether anything has to be divided at all; by free memory.

Owns those two decisions, which all ranks take alike from the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.balance import memory
from hvdtrain.data_parallel import shards
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.data_parallel import Setup


def parts_of(setup: Setup) -> list[float]:
    """Return each rank's part of the state, in sum 1: by the memory that it has free; collective.

    On hosts what is left is divided among the ranks of a host.
    """
    local = len(setup.topology.host_of(setup.control.rank).ranks)
    own = memory.host_room_bytes(local)
    rooms = setup.control.gather(own)
    if any(one is None for one in rooms):
        return [1 / len(rooms)] * len(rooms)
    return shards.by_room(rooms)


def stage_needed(setup: Setup) -> int:
    """Return 0, 1 or 2: as little as lets the model fit, which the notes say why; collective."""
    raise UserError("data_parallel.stage auto", "1 or 2: what would fit is not known yet", "set data_parallel.stage: 2")
