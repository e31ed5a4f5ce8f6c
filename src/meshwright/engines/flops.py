"""Operations that training on a token needs, by the convention that MFU is stated in. Imports no framework."""

from meshwright.models.spec import ModelSpec


def training_flops(
    spec: ModelSpec, active_parameters: int, sequence_length: int, adapters: int = 0, *, reference: bool = False
) -> int:
    """Floating-point operations of training on one token: `6 P + 12 L H Q T`, under LoRA `4 P + 6 A + 12 L H Q T`.

    The convention of PaLM (Chowdhery et al., 2022, appendix B): a multiplication and an addition for each parameter,
    once forward and twice backward; and the two products of attention, over the whole square of scores although half
    of it is masked. What `train.remat` computes again isn't counted.

    Parameters that aren't trained have no gradient, which is one of the two backward. A reference that is computed
    beside, forward and without adapters, takes `2 P + 4 L H Q T` more.

    P are the `multiplied_parameters`, A those of adapters, L layers, H heads, Q the mean of the widths of a head's keys
    and of its values, T the sequence length.

    Arguments:
        spec: the architecture, with its vocabulary.
        active_parameters: those that take part in the computation of one token.
        sequence_length: tokens of a sequence.
        adapters: parameters of adapters; 0: there are none, and all parameters are trained.
        reference: whether the same tokens pass the model without adapters, too.
    """
    passes = (2 if adapters else 3) + reference
    products = 2 * passes * multiplied_parameters(spec, active_parameters) + 6 * adapters
    attention = 2 * (3 + reference) * spec.layers * spec.heads * sum(head_widths(spec)) * sequence_length
    return products + attention


def multiplied_parameters(spec: ModelSpec, active_parameters: int) -> int:
    """Parameters that take part in the computation of a token, without the tables that are looked up, not multiplied.

    Those are the position table, and the embedding where the head isn't tied to it.

    Arguments:
        spec: the architecture, with its vocabulary.
        active_parameters: those that take part in the computation of one token.
    """
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    if spec.positions == "learned":
        looked_up += spec.context_length * spec.width
    return active_parameters - looked_up


def head_widths(spec: ModelSpec) -> tuple[int, int]:
    """The width of a head's queries and keys, and that of its values."""
    if spec.attention == "latent":
        return spec.head_width + spec.rotary_width, spec.value_width or spec.head_width
    return spec.head_width, spec.head_width
