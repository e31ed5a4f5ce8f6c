"""Tiny random models of transformers, and what the parity tests make of them.

Shapes: B batch, T time, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.engines.jax.loss import Head, cross_entropy_sum
from meshwright.models import hf
from meshwright.models.decoder import Decoder
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, shared_tensors, write

VOCAB, BATCH, TIME = 97, 2, 14

Tensors = dict[str, np.ndarray]


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, TIME))


def theirs(model_type: str, seed: int = 0, **keys: Any) -> Any:
    """A model of transformers, every parameter random and large enough to matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)  # it only waits for the other ones
    torch.manual_seed(seed)
    # PyTorch gives the embedding of a token for padding no gradient, wherever it stands.
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, pad_token_id=None, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += (0.3 if "norm" in name or "ln_" in name or "bias" in name else 0.08) * torch.randn(
                parameter.shape
            )
    return model


def their_step(model: Any, ids_BT: np.ndarray) -> tuple[np.ndarray, Tensors]:
    """Logits, `[B, T, V]`, and the gradients of the mean loss of the tokens but the first."""
    import torch

    model.zero_grad()
    ids = torch.tensor(ids_BT)
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return out.logits.detach().numpy(), gradients


def state_of(model: Any) -> Tensors:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def filled(spec: ModelSpec, rules: list[Rule], tensors: Tensors) -> dict:
    """Our parameters, made of theirs by rules, one slice at a time."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param))
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), shapes)
    for rule in rules:
        whole = _at(params, rule.ours)
        for index, name in rule.tensors(whole.shape):
            whole[index] = rule.read(tensors[name])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)), "no rule for a parameter"
    return params


def unfilled(rules: list[Rule], params: dict, *, gradients: bool = False) -> Tensors:
    """Their tensors, made of our parameters; of gradients, only what is linear in the maps is used."""
    made: Tensors = {}
    for parts in shared_tensors(rules):
        for index, name in parts[0].tensors(_at(params, parts[0].ours).shape):
            slices = [np.asarray(_at(params, rule.ours))[index] for rule in parts]
            made[name] = write(parts, slices)
            if gradients:
                made[name] = made[name] - write(parts, [np.zeros_like(x) for x in slices])
    return made


def _at(params: dict, path: str) -> np.ndarray:
    for name in path.split("."):
        params = params[name]
    return params


def our_logits(spec: ModelSpec, params: dict, ids_BT: np.ndarray, **more: Any) -> np.ndarray:
    return np.asarray(jax.jit(lambda params: decoder(spec, params)(jnp.asarray(ids_BT), **more))(params))


def decoder(spec: ModelSpec, params: dict) -> Decoder:
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)


def our_gradients(spec: ModelSpec, params: dict, ids_BT: np.ndarray) -> tuple[float, dict]:
    """The mean loss of the tokens but the first and its gradient, as training computes them: scanned, and with parts
    of each layer computed again."""
    ids_BT = jnp.asarray(ids_BT)

    def loss(params: dict) -> jax.Array:
        model = decoder(spec, params)
        x_BTD, _ = model.hidden(ids_BT, scan_layers=True, remat="products")
        x_ND = x_BTD[:, :-1].reshape(-1, spec.width)
        targets_N = ids_BT[:, 1:].reshape(-1)
        head, more = Head(*model.head_weights()), {"vocab": spec.vocab_size, "softcap": spec.final_softcap}
        total = cross_entropy_sum(x_ND, head, targets_N, jnp.ones(len(targets_N)), chunk=7, **more)
        return total / len(targets_N)

    return jax.jit(jax.value_and_grad(loss))(params)


def decoded(spec: ModelSpec, params: dict, ids_BT: np.ndarray) -> np.ndarray:
    """Logits by way of the cache: the first tokens at once, the others one by one."""

    @jax.jit
    def step(params: dict, ids_BT: jax.Array, positions_BT: jax.Array, cache: Any) -> Any:
        model = decoder(spec, params)
        x_BTD, cache = model.decode(ids_BT, positions_BT, cache, from_start=ids_BT.shape[1] > 1)
        return model.logits(x_BTD), cache

    cache, pieces = decoder(spec, params).empty_cache(BATCH, 16), []
    for start, stop in [(0, 6), *((place, place + 1) for place in range(6, TIME))]:
        positions_BT = np.broadcast_to(np.arange(start, stop), (BATCH, stop - start))
        logits, cache = step(params, ids_BT[:, start:stop], positions_BT, cache)
        pieces.append(logits)
    return np.concatenate(pieces, axis=1)


class Parity(NamedTuple):
    """One tiny model of both sides."""

    model: Any
    spec: ModelSpec
    rules: list[Rule]
    tensors: Tensors
    params: dict


def pair(model_type: str, **keys: Any) -> Parity:
    model = theirs(model_type, **keys)
    spec = hf.spec_from_hf(model.config.to_dict())
    rules = hf.weights(spec)
    return Parity(model, spec, rules, state_of(model), filled(spec, rules, state_of(model)))


def error(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())
