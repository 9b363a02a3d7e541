"""Small architectures with odd numbers, and random requests for them, for the tests of every engine. Not a test itself."""

from __future__ import annotations

from functools import cache
from inspect import isfunction
from math import prod
from typing import Any

from model.config import HashSpec, ModelConfig
from model.synthetic import random_candidates, random_context, random_ids, random_ranker, random_request

__all__ = ["random_candidates", "random_config", "random_context", "random_ids", "random_ranker", "random_request"]

USER_VOCAB, POST_VOCAB, AUTHOR_VOCAB = 211, 503, 307


def random_config(**overrides: Any) -> ModelConfig:
    """A May-like configuration, small and with odd numbers; any field can be replaced by keyword."""
    values: dict[str, Any] = {
        "width": 64,
        "layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_width": 16,
        "history_length": 37,
        "candidate_length": 24,
        "actions": 7,
        "continuous_actions": 3,
        "widening": 2.0,
        "has_dwell": True,
        "has_post_age": True,
        "code_levels": 3,
        "code_values": 11,
        "user_hashes": HashSpec((6364136223846793005, 40503), (1442695040888963407, 17), 2**61 - 1, USER_VOCAB),
        "post_hashes": HashSpec((2862933555777941757, 69069), (3037000493, 23), 2**61 - 1, POST_VOCAB),
        "author_hashes": HashSpec((3935559000370003845, 30011), (2691343689449507681, 29), 2**61 - 1, AUTHOR_VOCAB),
    }
    values.update(overrides)
    return ModelConfig(**values)


@cache
def interpret_quickly() -> None:
    """Triton's interpreter patches its language again for each function that a kernel calls, makes types and shapes anew for each
    operation, and computes overflows for assertions that are off. Here it does each once or not at all, with the same results. Its
    products come from a library in which a row's bits depend on its place: here each row is added up by itself, as on a card."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def modules(function: Any) -> list[Any]:
        return [each for each in function.__globals__.values() if each is language or each is language.core]

    def patch_once(function: Any) -> Any:
        return nothing if all(isfunction(each.range) for each in modules(function)) else patch(function)

    def once(make: Any) -> Any:
        """What is made of types, which are told apart by their names."""
        made: dict[Any, Any] = {}

        def kept(*types: Any) -> Any:
            key = types[0].name if len(types) == 1 else (types[0].name, types[1].name)
            if (found := made.get(key)) is None:
                found = made[key] = make(*types)
            return found

        return kept

    def shape_of(kind: Any) -> tuple[Any, Any]:
        shape = kind.shape if kind.is_block() else ()
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))

    known_shape = once(shape_of)

    def begin(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known_shape(type)

    def dot(a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        total = d.data.copy()
        for place in range(a.data.shape[1]):
            total += a.data[:, place, None] * b.data[place]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.interpreter_builder.create_dot = dot
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = once(interpreter._get_np_dtype)
    core.tensor.__init__ = begin
    core.block_type.with_element_ty = once(core.block_type.with_element_ty)
    # an overflow is told of by an assertion, and those are off
    assert not interpreter.interpreter_builder.options.debug
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
