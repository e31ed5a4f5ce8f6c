"""The one exception a user's mistake raises: shown as a line, never as a traceback."""


class UserError(Exception):
    """Something the user can mend: the message names the key or path, the value, the rule and what to do."""


def closest(word: str, known: list[str]) -> str:
    """A hint for a misspelt word.

    Arguments:
        word: what the user wrote.
        known: the words that would have been right.

    Returns:
        `; did you mean X?` with the closest known word, or the list of them all where none is close.
    """
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; choose from {', '.join(sorted(known))}"
