"""What every section of the run file is made of. Imports no framework."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A table of the run file: frozen, typed, and closed (an unknown key is an error)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
