"""Prompts that can be gone on with. Imports no framework."""

from meshwright.errors import UserError


def check_prompts(prompts: list[list[int]], max_tokens: int, context: int) -> int:
    """Refuse what doesn't fit.

    Arguments:
        prompts: token ids.
        max_tokens: the most tokens to add to each.
        context: the most positions that the model has.

    Returns:
        The length of the longest prompt.

    Raises:
        UserError: a prompt is empty, or a prompt and what is to come exceed the context length.
    """
    longest = max(len(prompt) for prompt in prompts)
    if not all(prompts):
        raise UserError("prompt = '': must hold at least one token; begin with the end-of-text token instead")
    if longest >= context:
        raise UserError(f"prompt: its {longest} tokens must be fewer than model.context_length = {context}; shorten it")
    if longest + max_tokens > context:
        raise UserError(
            f"max_tokens = {max_tokens}: prompt ({longest} tokens) and continuation must fit model.context_length = "
            f"{context}; ask for at most {context - longest}"
        )
    return longest
