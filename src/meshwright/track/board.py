"""The metrics as TensorBoard scalars, written by TensorBoard's own writer: no TensorFlow, no torch."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import UserError


class TensorBoardLog:
    """Event files that hold what `metrics.jsonl` holds.

    Keys become tags: `loss` is `train/loss`, `val_loss` is `validation/loss`; a key with a slash is a tag as it is.
    TensorBoard keeps values as float32.

    Arguments:
        directory: where the event files go; made if missing.

    Raises:
        UserError: the package `tensorboard` isn't installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UserError(
                "track.tensorboard = true: needs the package tensorboard; pip install 'meshwright[track]'"
            ) from None
        self._proto: Any = event_pb2
        self._writer = EventFileWriter(str(directory))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, training or evaluation (see `MetricsLog`)."""
        event = self._proto.Event(wall_time=time.time(), step=record["step"])
        for key, value in record.items():
            if key != "step" and not isinstance(value, str):
                event.summary.value.add(tag=_tag(key), simple_value=float(value))
        self._write(event)

    def truncate_after(self, step: int) -> None:
        """Have TensorBoard drop the records of later steps, which a resumed run takes again.

        Arguments:
            step: the count of steps done in the checkpoint that the run resumes from; its own records stay.
        """
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        # TensorBoard drops what it read before at this step and later ones.
        self._write(self._proto.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.add_event(event)
        # The writer's thread writes when it likes; a killed process would lose what it hasn't written yet.
        self._writer.flush()


def _tag(key: str) -> str:
    if "/" in key:
        return key
    return f"validation/{key.removeprefix('val_')}" if key.startswith("val_") else f"train/{key}"
