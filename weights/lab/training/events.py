"""TensorBoard's event files of a run: its losses and its learning rate. They need the extra `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weights.lab.training.trainer import LOOK_LOSSES, Look

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def event_writer(directory: Path) -> SummaryWriter:
    """A writer of event files in a directory. What earlier runs wrote there is shown no more.

    Raises ValueError without the package, and OSError.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "Event files need the package tensorboard, from the extra of that name: pip install '.[tensorboard]'"
        ) from error
    return SummaryWriter(str(directory), purge_step=0)


def write_look(writer: SummaryWriter, look: Look) -> None:
    """Write an evaluation at its step, so that it can be seen at once."""
    for name in LOOK_LOSSES:
        writer.add_scalar(name, getattr(look, name), look.step)
    writer.flush()
