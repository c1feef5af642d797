"""KV cache with one preallocated row per sequence and a length of its own for each.

A step writes Q new slots behind each row's committed length; `commit` keeps a path of them and forgets the
rest. A rejected token costs nothing, an accepted one at most the copy of its own slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import Cache

# From this many rows on, attention is two batched matrix products, which copy a slice of each row before they
# start. Such a cache grows in small steps and shows whole rows; the mask hides the unused slots.
WIDE = 16


class KVCache(Cache):
    """Keys and values [rows, kv heads, capacity, head dim] per layer, each on its layer's device.

    Grown by a twenty-fifth at a time, so that it holds at most 4 % (or 8 slots) more than its longest row needs: a
    growing step copies the rows, which is a tenth of a per cent of the time of the tokens between two of them.

    `lengths[b]` is the number of committed tokens of row b. It lives on the host: it is known there after
    every commit, so that no step has to ask the device for it.
    """

    def __init__(self, rows: int = 1, capacity: int = 0) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.lengths = [0] * rows
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.pads = True
        """Attention pads its mask, so that a wide cache may show slots behind the newest one."""

    # -- what a model's forward calls ---------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, Hkv, Q, D] behind the committed lengths; return keys and values [B, Hkv, K, D]."""
        if layer_idx == len(self.keys):
            self._append(key_states, value_states)
        new = key_states.shape[2]
        end = max(self.lengths) + new
        self._reserve(layer_idx, end)
        for buffer, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if min(self.lengths) == max(self.lengths):
                buffer[:, :, end - new : end] = states
            else:
                row, slot = self._slots(new, states.device)
                buffer[row, :, slot] = states.transpose(1, 2)
        have = self.keys[layer_idx].shape[2]
        shown = end if self.shows_exactly or end < 0.7 * have else have
        return self.keys[layer_idx][:, :, :shown], self.values[layer_idx][:, :, :shown]

    @property
    def shows_exactly(self) -> bool:
        """Whether `update` returns no slot behind the newest one; else a mask must hide them."""
        return self.rows < WIDE or not self.pads

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.lengths) + query_length, 0

    # -- what the step loop calls -------------------------------------------------------------------

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, for each row, the written slots `path` (increasing offsets behind the committed length)."""
        for row, path in enumerate(paths):
            start = self.lengths[row]
            if list(path) != list(range(len(path))):  # the common prefix is already where it belongs
                index = torch.tensor(path) + start
                for buffer, here in self._with_index(index):
                    buffer[row, :, start : start + len(path)] = buffer[row, :, here]
            self.lengths[row] = start + len(path)

    def crop_row(self, row: int, length: int) -> None:
        """Forget everything of a row behind `length` tokens. Raises ValueError if it has fewer."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot crop row {row} of {self.lengths[row]} tokens to {length}")
        self.lengths[row] = length

    def select(self, rows: Sequence[int], from_position: int = 0) -> None:
        """Row i becomes a copy of row rows[i]; slots before `from_position` are known to be equal and stay."""
        index = torch.tensor(rows)
        end = max(self.lengths)
        if len(rows) == self.rows:
            for buffer, here in self._with_index(index):
                buffer[:, :, from_position:end] = buffer[here, :, from_position:end]
        else:
            chosen = [buffer[here] for buffer, here in self._with_index(index)]
            self.keys, self.values = chosen[: len(self.keys)], chosen[len(self.keys) :]
            self.rows = len(rows)
        self.lengths = [self.lengths[r] for r in rows]

    def load_row(self, row: int, other: KVCache) -> None:
        """Replace a row by the only row of another cache (a freshly prefilled sequence)."""
        length = other.lengths[0]
        if not self.keys:
            for k, v in zip(other.keys, other.values, strict=True):
                self.keys.append(k.new_zeros(self.rows, k.shape[1], self.capacity, k.shape[3]))
                self.values.append(v.new_zeros(self.rows, v.shape[1], self.capacity, v.shape[3]))
        for layer in range(len(self.keys)):
            self._reserve(layer, length)
            self.keys[layer][row, :, :length] = other.keys[layer][0, :, :length]
            self.values[layer][row, :, :length] = other.values[layer][0, :, :length]
        self.lengths[row] = length

    def move_row(self, source: int, row: int) -> None:
        """Row `row` becomes what row `source` is; `source` is left empty."""
        length = self.lengths[source]
        for buffer in (*self.keys, *self.values):
            buffer[row, :, :length] = buffer[source, :, :length]
        self.lengths[row], self.lengths[source] = length, 0

    def branches(self, starts: Sequence[int], more: int) -> KVCache:
        """A cache of len(starts) rows with room for `more` tokens each; row i begins with the first starts[i] tokens of
        the only row of this cache, which stays as it is. Raises ValueError if there are more rows or fewer tokens."""
        if self.rows != 1 or not all(0 <= start <= self.lengths[0] for start in starts):
            raise ValueError(f"branches of one row of {self.lengths[0]} tokens; got {self.rows} rows, starts {starts}")
        most = max(starts)
        made = KVCache(len(starts), capacity=most + more)
        made.lengths = list(starts)
        for mine, theirs in ((self.keys, made.keys), (self.values, made.values)):
            for buffer in mine:
                theirs.append(buffer.new_zeros(made.rows, buffer.shape[1], made.capacity, buffer.shape[3]))
                theirs[-1][:, :, :most] = buffer[:, :, :most]
        return made

    def swap_rows(self, a: int, b: int) -> None:
        """Rows `a` and `b` change places."""
        end = max(self.lengths[a], self.lengths[b])
        for buffer in (*self.keys, *self.values):
            kept = buffer[a, :, :end].clone()
            buffer[a, :, :end] = buffer[b, :, :end]
            buffer[b, :, :end] = kept
        self.lengths[a], self.lengths[b] = self.lengths[b], self.lengths[a]

    def view(self, start: int, stop: int) -> KVCache:
        """Rows start..stop as a cache of their own that shares their memory. It holds until another view, or this
        cache, grows: take one for each forward."""
        return self if (start, stop) == (0, self.rows) else _View(self, start, stop)

    # -- inside -------------------------------------------------------------------------------------

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Room for one more layer, like these states."""
        shape = (self.rows, key_states.shape[1], self.capacity)
        self.keys.append(key_states.new_zeros(*shape, key_states.shape[3]))
        self.values.append(value_states.new_zeros(*shape, value_states.shape[3]))

    def _with_index(self, index: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every buffer, keys first, with the index on its device: the layers may lie on several."""
        there: dict[torch.device, torch.Tensor] = {}
        for buffer in (*self.keys, *self.values):
            if buffer.device not in there:
                there[buffer.device] = index.to(buffer.device)
            yield buffer, there[buffer.device]

    def _slots(self, new: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.tensor(self.lengths, device=device)
        return torch.arange(self.rows, device=device)[:, None], start[:, None] + torch.arange(new, device=device)

    def _reserve(self, layer: int, slots: int) -> None:
        have = self.keys[layer].shape[2]
        if slots > have:
            want = max(have + max(have // 25, 8), slots) if self.rows < WIDE else (slots + 63) // 64 * 64
            grown = []
            for old in (self.keys[layer], self.values[layer]):
                new = old.new_empty(*old.shape[:2], want, old.shape[3])
                new[:, :, :have] = old
                new[:, :, have:] = 0  # a masked slot still takes part in a product, where a NaN would spread
                grown.append(new)
            # only now: memory that runs out in between leaves the layer as it was
            self.keys[layer], self.values[layer] = grown
            self.capacity = max(self.capacity, want)


class _View(KVCache):
    """Some rows of another cache."""

    def __init__(self, whole: KVCache, start: int, stop: int) -> None:
        if not 0 <= start < stop <= whole.rows:
            raise ValueError(f"rows {start} to {stop} of a cache of {whole.rows}")
        super().__init__(stop - start)
        self._whole, self._rows = whole, slice(start, stop)
        self.lengths = whole.lengths[self._rows]
        self.keys = [x[self._rows] for x in whole.keys]
        self.values = [x[self._rows] for x in whole.values]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        super().commit(paths)
        self._settle()

    def crop_row(self, row: int, length: int) -> None:
        super().crop_row(row, length)
        self._settle()

    def select(self, rows: Sequence[int], from_position: int = 0) -> None:
        if len(rows) != self.rows:
            raise ValueError(f"{len(rows)} rows for a view of {self.rows}")
        super().select(rows, from_position)
        self._settle()

    def _settle(self) -> None:
        self._whole.lengths[self._rows] = self.lengths

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._whole._append(key_states, value_states)
        self.keys.append(self._whole.keys[-1][self._rows])
        self.values.append(self._whole.values[-1][self._rows])

    def _reserve(self, layer: int, slots: int) -> None:
        if slots > self.keys[layer].shape[2]:
            self._whole._reserve(layer, slots)
            self.keys[layer] = self._whole.keys[layer][self._rows]
            self.values[layer] = self._whole.values[layer][self._rows]


def attention_mask(
    lengths: Sequence[int],
    ancestors: torch.Tensor,
    depths: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Boolean mask [B, 1, Q, K]: a new token sees its row's committed tokens and its own ancestors.

    `ancestors` [B, Q, Q] (or [Q, Q] for all rows) is True where query i may see new token j, itself included.
    `depths` [B, Q] are the new tokens' distances from the committed end; with `window` a token sees only
    keys fewer than `window` positions back. Raises ValueError for a window without depths.
    """
    device = ancestors.device
    b, q = len(lengths), ancestors.shape[-1]
    if ancestors.dim() == 2:
        ancestors = ancestors.expand(b, q, q)
    end = max(lengths)
    if min(lengths) == end:
        mask = torch.cat([torch.ones(b, q, end, dtype=torch.bool, device=device), ancestors], dim=2)
        if window is None:
            return mask[:, None]
    length = torch.tensor(lengths, device=device)[:, None]  # [B, 1]
    slot = torch.arange(end + q, device=device)[None]  # [1, K]
    offset = slot - length  # [B, K], index among the new tokens
    if min(lengths) != end:
        inside = (offset >= 0) & (offset < q)
        own = torch.gather(ancestors, 2, offset.clamp(0, q - 1)[:, None].expand(b, q, end + q))
        mask = (offset < 0)[:, None] | (inside[:, None] & own)
    if window is not None:
        if depths is None:
            raise ValueError("a sliding window needs the depths of the new tokens")
        position = length + depths  # [B, Q]
        at = torch.where(offset < 0, slot.expand(b, -1), torch.gather(position, 1, offset.clamp(0, q - 1)))
        mask = mask & (position[:, :, None] - at[:, None, :] < window)
    return mask[:, None]
