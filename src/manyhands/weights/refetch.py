"""What is found damaged in a folder that was fetched is fetched again, once, from where it came from."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from manyhands.aside import aside
from manyhands.checkpoint.folder import FILES, JOURNAL
from manyhands.checkpoint.store import Store
from manyhands.errors import Damaged, ManyhandsError, ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def use_fetched(
    folder: Path, again: Callable[[], Awaitable[Path]] | None, use: Callable[[Path], Awaitable[T]]
) -> T:
    """`use` of `folder`; where that raises Damaged and the folder was fetched, of what `again` fetches anew, once.

    `again` None: no source is known here; what is damaged is fetched when the model is next asked for by its name. Raises what
    they raise; ModelError with both reasons if fetching again fails.
    """
    try:
        return await use(folder)
    except Damaged as error:
        if not await aside(forget, error):
            raise
        if again is None:
            raise ModelError(f"{error}; or start again with the model's name instead of its folder") from error
        damage = error
    logger.warning("%s; fetching it again", damage)
    try:
        folder = await again()
    except ManyhandsError as error:
        raise ModelError(f"{damage}; it cannot be fetched again: {error}") from error
    return await use(folder)


def forget(damage: Damaged) -> bool:
    """Let what is damaged count as missing, so that the next fetch brings it; False if the folder was not fetched.

    Blocking: waits for another fetch of the folder.
    """
    folder = Path(damage.folder)
    if not (folder / JOURNAL).exists():
        return False
    from huggingface_hub.utils import WeakFileLock  # with yaml and filelock, for what is rare

    with WeakFileLock(folder / ".lock"):
        store = Store(folder)
        for names in store.held.values():
            names.difference_update(damage.names)
        store.commit()
        for name in FILES.intersection(damage.names) | {"config.json"}.intersection(damage.names):
            (folder / name).unlink(missing_ok=True)
    return True
