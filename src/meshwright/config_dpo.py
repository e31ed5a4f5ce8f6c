"""The section `[dpo]` of the run file, and what must hold where a run trains on pairs. Imports no framework."""

from pydantic import PositiveFloat

from meshwright.config_base import Section
from meshwright.config_data import DataSection


class DpoSection(Section):
    """Direct Preference Optimization, which `data.packing = "pairs"` asks for."""

    beta: PositiveFloat = 0.1
    """How near the model is held to the one without adapters: rewards are log-probability ratios times this."""


def check_dpo(data: DataSection, engine: str, lora_rank: int) -> None:
    """Refuse what training on pairs can't go with.

    Arguments:
        data: of the run, with `packing = "pairs"`.
        engine, lora_rank: the run's.

    Raises:
        ValueError: something doesn't go with it.
    """
    if engine != "torch":
        raise ValueError(f'engine = "{engine}": doesn\'t train on pairs (data.packing = "pairs"); set engine = "torch"')
    if not lora_rank:
        raise ValueError(
            'lora.rank = 0: under data.packing = "pairs" the model is compared with itself without adapters; set a '
            "rank, such as 16"
        )
    fields = [one.field for one in data.sources if one.field != "text"]
    if fields:
        raise ValueError(
            f'data.field = {fields[0]!r}: under data.packing = "pairs" rows are read at prompt, chosen and rejected; '
            "leave it out"
        )
