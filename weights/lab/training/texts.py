"""The texts of a log's ids, by the 64-bit ids that a model reads for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from weights.tables import TableError
from weights.text_ids import text_ids


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """`ids` uint64 `[m]`, sorted; `texts`: the text of each id."""

    ids: NDArray[np.uint64]
    texts: pa.Array

    def of(self, ids: NDArray[np.uint64]) -> pa.Array:
        """The texts of these ids, which must be among them; an empty text for 0, which is nobody."""
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return pc.if_else(pa.array(ids == 0), "", self.texts.take(pa.array(place)))

    @classmethod
    def of_columns(cls, columns: Iterable[pa.DictionaryArray], where: str) -> Texts:
        """The texts of some columns. Raises TableError, which names the table `where`, where two texts have one id."""
        return cls.of_texts(pa.concat_arrays([column.dictionary for column in columns]).unique(), where)

    @classmethod
    def of_texts(cls, texts: pa.Array, where: str) -> Texts:
        """These texts, all different. Raises TableError, which names the table `where`, where two of them have one id."""
        ids = text_ids(texts.to_pylist())
        order = np.argsort(ids, kind="stable")
        ids, texts = ids[order], texts.take(pa.array(order))
        if (same := ids[1:] == ids[:-1]).any():
            first = int(same.argmax())
            raise TableError(
                f"{where}: {texts[first].as_py()!r} and {texts[first + 1].as_py()!r} have one hash, so a model cannot tell them apart"
            )
        return cls(ids, texts)
