"""What to do about a name that the Hugging Face hub gives nothing for."""

from meshwright.errors import UserError


def refused(key: str, kind: str, error: Exception, mend: str) -> UserError:
    """The error to raise.

    Arguments:
        key: of the run file, that has the name.
        kind: its value.
        error: what the hub's library raised.
        mend: what to give in place of a name that isn't there.
    """
    what = f"{key} = {kind!r}"
    kinds = {one.__name__ for one in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return UserError(f"{what}: is gated; accept its terms on its page of the hub, then log in (`hf auth login`)")
    if "RepositoryNotFoundError" in kinds:
        return UserError(
            f"{what}: no such folder, and the hub has none of that name that you may see; {mend}, and log in for a "
            "private one (`hf auth login`)"
        )
    said = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return UserError(f"{what}: no such folder, and the hub gave none ({why}); {mend}")
