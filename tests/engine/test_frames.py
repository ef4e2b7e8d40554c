"""What moves a frame: copies into buffers, numbers to the host, results by their first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from voxmma import _C

INT64 = torch.iinfo(torch.int64)


def put(buffers: list[torch.Tensor], sources: list[Any]) -> None:
    _C.put(buffers, [s.cuda() if isinstance(s, torch.Tensor) else s for s in sources])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_coordinates_are_put_into_a_buffer(dtype: torch.dtype) -> None:
    large = torch.tensor(
        [[0, 1, -2, 3], [1, 1 << 40, -(1 << 40), (1 << 30) + 1], [INT64.max, INT64.min, 0, 0]]
    )
    rows = torch.cat([large[: 1 if dtype == torch.int32 else 3], torch.randint(-99, 99, (700, 4))]).to(dtype)
    for given in (rows, rows[:0], rows[3:5], rows.flip(1)[::2], rows.t().contiguous().t()):
        buffer = torch.full((800, 4), 7, dtype=torch.int32, device="cuda")
        count = torch.full((1,), -1, device="cuda")
        put([buffer, count], [given, len(given)])
        assert count.item() == len(given)
        assert torch.equal(buffer[: len(given)].cpu(), given.clamp(-(1 << 30), 1 << 30).int())
        assert bool((buffer[len(given) :] == 7).all())
    with pytest.raises(ValueError, match=r"a buffer of \[9, 4\] on cuda:0 has no room for"):
        put([buffer[:9]], [rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.uint8, torch.complex64])
@pytest.mark.parametrize("columns", [1, 3, 4, 7, 8])
def test_rows_are_put_into_wider_ones(dtype: torch.dtype, columns: int) -> None:
    made = torch.randint(0, 99, (5000, 2 * columns + 1)).to(dtype)
    if dtype.is_complex:
        made = made * (1 + 2j)
    sources = [
        made[:, :columns],
        made[1::3, 1 : columns + 1],
        made[:, ::2][:, :columns],
        made[:, :columns].contiguous(),
    ]
    sources += [
        made[:1, :columns].expand(70, columns),
        made.t()[:columns].contiguous().t(),
        made[:0, :columns],
    ]
    sources += [made[:, :columns].conj()]
    for wide in (columns, 8, 40):
        buffers = [torch.full((6000, wide), 5, dtype=dtype, device="cuda") for _ in sources]
        put(buffers, sources)
        for buffer, source in zip(buffers, sources, strict=True):
            wanted = torch.full((6000, wide), 5, dtype=dtype)
            wanted[: len(source), :columns] = source
            assert torch.equal(buffer.cpu(), wanted)


@pytest.mark.gpu
def test_other_tensors_are_put_whole() -> None:
    sources = [
        torch.tensor(3.5),
        torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1),
        torch.arange(7),
        torch.randn(0, 3),
    ]
    buffers = [torch.zeros(t.shape, dtype=t.dtype, device="cuda") for t in sources]
    put(buffers, sources)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(buffers, sources, strict=True))
    with pytest.raises(ValueError, match="has no room for"):
        put(buffers[1:2], [sources[1][:1]])
    with pytest.raises(TypeError, match="a buffer of Float got Double"):
        put(buffers[:1], [sources[0].double()])
    with pytest.raises(ValueError, match="1 sources for 2 buffers"):
        put(buffers[:2], sources[:1])


@pytest.mark.gpu
def test_many_copies() -> None:
    given = [torch.randn(n, 5, device="cuda") for n in range(70)]
    given += [
        given[9][1:, 1:],
        given[60].t(),
        torch.randn(2, 4, 3, 3, device="cuda").to(memory_format=torch.channels_last),
    ]
    given += [torch.randn(3_000_001, device="cuda")[1:], given[9][:1].expand(6, 5), torch.arange(4)]
    with torch.inference_mode():
        made = _C.copies(given)
    assert not any(t.is_inference() for t in made)
    for got, source in zip(made, given, strict=True):
        assert torch.equal(got, source) and got.device == source.device
        assert got.numel() == 0 or got.data_ptr() != source.data_ptr()
    assert made[72].stride() == given[72].stride()


@pytest.mark.gpu
def test_numbers_are_told_when_they_were_there() -> None:
    """Whatever was told before, read or not."""
    numbers, told = torch.zeros(6, 4, dtype=torch.int64, device="cuda"), []
    buffer = torch.zeros(1, dtype=torch.int64, device="cuda")
    for n in range(9):
        torch.cuda._sleep(100_000)
        numbers.fill_(n)
        told.append(_C.Told.of(numbers, [buffer], [n]))
        if n % 3 == 0:
            del told[-1]
    assert [one.numbers() for one in told] == [[n] * 24 for n in (1, 2, 4, 5, 7, 8)]
    assert buffer.item() == 8


def test_first_rows(device: torch.device) -> None:
    x = torch.randn(6, 3, device=device)
    tensors = [x, x[:, 1:], x, torch.randn(4, 2, 2, device=device), x]
    got = _C.first_rows(tensors, [4, 2, 0, 3, -1])
    assert got[4] is x
    for part, whole, n in zip(got, tensors, (4, 2, 0, 3), strict=False):
        assert torch.equal(part, whole[:n]) and part.stride() == whole[:n].stride()
        assert n == 0 or part.data_ptr() == whole.data_ptr()
    before = got[0]._version
    x.add_(1)
    assert got[0]._version == before + 1 and torch.equal(got[0], x[:4])
    for rows in ([7], [1, 1]):
        with pytest.raises(ValueError, match="rows"):
            _C.first_rows([x], rows)
