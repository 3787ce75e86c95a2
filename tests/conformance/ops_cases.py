"""Cases that every `hvdtrain.core.protocols.Ops` must pass: ``check_*(ops)`` with answers worked out by hand.

A backend's test is: ``@pytest.mark.parametrize("check", CASES, ids=name_of)`` ... ``check(ops)``.
Owns no framework: arrays go in by ``ops.from_host`` and come out by ``ops.to_host``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

F = np.float32


def give(ops, values, dtype="float32"):
    """Return a host array as the backend's."""
    return ops.from_host(np.asarray(values, dtype))


def same(ops, got, want, dtype=None):
    """Equal values, shape and (if given) dtype name."""
    host = ops.to_host(got)
    assert isinstance(host, np.ndarray), type(host)
    want = np.asarray(want)
    assert host.shape == want.shape, (host.shape, want.shape)
    if dtype is not None:
        assert host.dtype.name == dtype, (host.dtype.name, dtype)
    np.testing.assert_array_equal(host, want)


def check_name(ops):
    assert isinstance(ops.name, str) and ops.name


def check_host_round_trip(ops):
    for dtype in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"):
        same(ops, ops.from_host(np.arange(6, dtype=dtype).reshape(2, 3)), np.arange(6).reshape(2, 3), dtype)
    same(ops, ops.from_host(np.zeros((0,), F)), np.zeros(0), "float32")


def check_zeros(ops):
    for dtype in ("float32", "float16", "int8", "int64"):
        same(ops, ops.zeros(3, dtype), [0, 0, 0], dtype)
    same(ops, ops.zeros(0, "float32"), np.zeros(0), "float32")


def check_cast(ops):
    x = give(ops, [-1.75, 0.5, 2.0])
    same(ops, ops.cast(x, "float64"), [-1.75, 0.5, 2.0], "float64")
    same(ops, ops.cast(x, "float16"), [-1.75, 0.5, 2.0], "float16")
    same(ops, ops.cast(x, "int32"), [-1, 0, 2], "int32")
    same(ops, ops.cast(give(ops, [-128, 127], "int8"), "float32"), [-128, 127], "float32")
    same(ops, ops.cast(give(ops, [1 + 2**-11, 65504.0]), "float16"), [1.0, 65504.0], "float16")


def check_reshape(ops):
    x = give(ops, range(6))
    same(ops, ops.reshape(x, (2, 3)), np.arange(6).reshape(2, 3))
    same(ops, ops.reshape(x, [3, -1]), np.arange(6).reshape(3, 2))


def check_pack_unpack(ops):
    shapes = [(2, 3), (), (0,), (4,), (1, 1, 2)]
    flat = np.arange(13, dtype=F)
    parts = ops.unpack(ops.from_host(flat), shapes)
    assert [tuple(ops.to_host(p).shape) for p in parts] == shapes
    same(ops, parts[0], flat[:6].reshape(2, 3))
    same(ops, parts[1], flat[6])
    same(ops, parts[4], flat[11:].reshape(1, 1, 2))
    same(ops, ops.pack(parts), flat, "float32")
    same(ops, ops.pack([give(ops, [[1, 2], [3, 4]], "int8")]), [1, 2, 3, 4], "int8")


def check_bits16(ops):
    cases = [(0.0, 0x0000), (-0.0, 0x8000), (1.0, 0x3F80), (-2.0, 0xC000), (3.140625, 0x4049),
             (np.inf, 0x7F80), (-np.inf, 0xFF80),
             (1 + 2**-8, 0x3F80),             # a tie, to even: down
             (1 + 3 * 2**-8, 0x3F82),         # a tie, to even: up
             (1 + 2**-8 + 2**-23, 0x3F81),    # just above a tie
             (np.finfo(F).max, 0x7F80)]       # rounds to infinity
    bits = np.array([b for _, b in cases], np.uint16).view(np.int16)
    same(ops, ops.bits16(give(ops, [x for x, _ in cases])), bits, "int16")
    nans = np.array([0x7F800001, 0xFFC00000, 0x7FFFFFFF], np.uint32).view(F)
    back = ops.to_host(ops.from_bits16(ops.bits16(ops.from_host(nans))))
    assert np.isnan(back).all(), back


def check_from_bits16(ops):
    x = np.array([0.0, 1.0, -2.5, 3.140625, 2.0**100, -2.0**-130, np.inf], F)
    same(ops, ops.from_bits16(ops.bits16(ops.from_host(x))), x, "float32")
    rng = np.random.default_rng(0)
    y = rng.standard_normal(1000).astype(F)
    back = ops.to_host(ops.from_bits16(ops.bits16(ops.from_host(y))))
    assert (np.abs(back - y) <= np.abs(y) * 2.0**-8).all()


def check_bitcast(ops):
    x = np.array([1.0, -2.5, 3e-39, np.inf], F)
    for dtype in ("int32", "int8", "int16", "uint8"):
        bits = ops.bitcast(ops.from_host(x), dtype)
        same(ops, bits, x.view(dtype), dtype)
        assert ops.to_host(ops.bitcast(bits, "float32")).tobytes() == x.tobytes()
    half = np.array([1.0, -65504.0, 6e-8], np.float16)
    same(ops, ops.bitcast(ops.from_host(half), "int16"), half.view(np.int16), "int16")
    same(ops, ops.bitcast(give(ops, [], "float32"), "int32"), np.zeros(0), "int32")


def check_bitcast_of_a_part(ops):
    """Check a row of a matrix and a flattened slice of columns, as compressors read them from a message."""
    whole = np.arange(32, dtype=np.int8).reshape(2, 16)
    part = ops.reshape(ops.from_host(whole)[:, :8], (-1,))
    same(ops, ops.bitcast(part, "float32"), np.ascontiguousarray(whole[:, :8]).view(F).reshape(-1), "float32")
    same(ops, ops.bitcast(ops.from_host(whole)[0, 12:], "int32"), whole[0, 12:].view(np.int32), "int32")


def check_bitcast_of_memory_between_elements(ops):
    x = ops.from_host(np.arange(16, dtype=np.int8))[2:14]
    if not type(x).__module__.startswith("tensorflow"):  # whose slices may be copies
        with pytest.raises((ValueError, RuntimeError)):
            ops.bitcast(x, "float32")


def check_topk(ops):
    x = give(ops, [1.0, -5.0, 0.0, 3.0, -3.0])
    values, index = (ops.to_host(a) for a in ops.topk(x, 3))
    assert index.dtype == np.int64 and values.dtype == F and sorted(index.tolist()) == [1, 3, 4]
    np.testing.assert_array_equal(values, np.array([1, -5, 0, 3, -3], F)[index])


def check_topk_ties_go_to_the_lower_index(ops):
    for n, k in ((5, 2), (1000, 7), (64, 63)):
        _, index = ops.topk(give(ops, [(-1.0) ** i for i in range(n)]), k)
        assert sorted(ops.to_host(index).tolist()) == list(range(k)), (n, k)
    _, index = ops.topk(give(ops, [2, 1, 3, -1, 1, 1]), 4)
    assert sorted(ops.to_host(index).tolist()) == [0, 1, 2, 3]


def check_topk_bounds(ops):
    x = give(ops, [3.0, 1.0, 2.0])
    _, index = ops.topk(x, 3)
    assert sorted(ops.to_host(index).tolist()) == [0, 1, 2]
    values, index = ops.topk(x, 0)
    assert ops.to_host(values).shape == (0,) and ops.to_host(index).shape == (0,)


def check_topk_of_many(ops):
    """Large enough that only candidates are sorted; each shape of data is one that a sample could misjudge."""
    draw = np.random.default_rng(5)
    n = 200_000
    normal = draw.standard_normal(n).astype(F)
    columns = normal.reshape(-1, 400) * (np.arange(400) % 100 == 7)          # whole columns of zeros
    blocks = np.where(np.arange(n) < n // 50, normal * 100, normal * 1e-3)   # one layer above all others
    rare = np.where(draw.random(n) < 0.002, normal, 0)                       # hardly anything but zeros
    steps = np.round(normal * 2)                                             # many ties
    for x in (normal, columns.reshape(-1), blocks, rare, steps, np.zeros(n), np.ones(n), np.arange(n)):
        x = x.astype(F)
        order = np.argsort(-np.abs(x), kind="stable")  # by the definition
        for k in (1, 37, n // 100, n // 4, n - 1, n):
            values, index = (ops.to_host(a) for a in ops.topk(ops.from_host(x), k))
            assert np.array_equal(np.sort(index), np.sort(order[:k])), k
            np.testing.assert_array_equal(values, x[index])


def check_topk_with_what_is_not_finite(ops):
    for n in (50, 200_000):
        x = np.random.default_rng(6).standard_normal(n).astype(F)
        for k in (1, 3, n // 100 or 1, n):
            for bad in (np.nan, np.inf, -np.inf):
                for where in ([n // 3], slice(None), slice(0, None, 3)):
                    y = x.copy()
                    y[where] = bad
                    values, index = (ops.to_host(a) for a in ops.topk(ops.from_host(y), k))
                    assert len(set(index.tolist())) == k and 0 <= index.min() and index.max() < n
                    np.testing.assert_array_equal(values, y[index])


def check_drop(ops):
    x = give(ops, [1.0, np.nan, np.inf, 4.0])
    same(ops, ops.drop(x, give(ops, [2, 0, 1], "int64")), [0, 0, 0, 4], "float32")
    same(ops, x, [1, np.nan, np.inf, 4])
    same(ops, ops.drop(x, give(ops, [], "int64")), [1, np.nan, np.inf, 4])


def check_take(ops):
    same(ops, ops.take(give(ops, [10, 20, 30]), give(ops, [2, 0, 2], "int64")), [30, 10, 30], "float32")


def check_scatter_add(ops):
    index, values = give(ops, [3, 0, 3], "int64"), give(ops, [1.0, 2.0, 4.0])
    same(ops, ops.scatter_add(5, index, values), [2, 0, 0, 5, 0], "float32")
    same(ops, values, [1, 2, 4])
    same(ops, ops.scatter_add(2, give(ops, [], "int64"), give(ops, [])), [0, 0], "float32")


def check_scatter_add_rows_in_order(ops):
    """Rows are added one after another: (1e8 + 1) - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1."""
    index = give(ops, [[1, 0], [0, 1], [1, 0]], "int64")
    values = give(ops, [[1e8, 1e8], [-1e8, 1.0], [-1e8, 1.0]])
    same(ops, ops.scatter_add(3, index, values), [1, 0, 0], "float32")
    same(ops, ops.scatter_add(2, index[:1], values[:1]), [1e8, 1e8], "float32")


def check_topk_scatter_round_trip(ops):
    x = np.array([0.5, -4.0, 0.25, 8.0, -1.0], F)
    values, index = ops.topk(ops.from_host(x), 2)
    same(ops, ops.scatter_add(5, index, values), [0, -4, 0, 8, 0])


def check_matmul_transpose(ops):
    a, b = np.arange(6, dtype=F).reshape(2, 3), np.arange(12, dtype=F).reshape(3, 4)
    same(ops, ops.matmul(ops.from_host(a), ops.from_host(b)), a @ b, "float32")
    same(ops, ops.transpose(ops.from_host(a)), a.T)
    same(ops, ops.matmul(ops.transpose(ops.from_host(b)), ops.transpose(ops.from_host(a))), (a @ b).T)


def check_minus_scaled(ops):
    x, y = give(ops, [[5.0, 6.0], [7.0, 8.0]]), give(ops, [[2.0, 4.0], [6.0, 8.0]])
    same(ops, ops.minus_scaled(x, y, 0.5), [[4, 4], [4, 4]], "float32")
    same(ops, x, [[5, 6], [7, 8]])


def check_orthogonalize(ops):
    rng = np.random.default_rng(1)
    for n, r in ((8, 1), (50, 4), (4, 4), (300, 16)):
        m = rng.standard_normal((n, r)).astype(F)
        given = ops.from_host(m.copy())
        q = ops.to_host(ops.orthogonalize(given))
        assert q.shape == (n, r) and q.dtype == F
        np.testing.assert_allclose(q.T @ q, np.eye(r), atol=2e-5)
        np.testing.assert_allclose(q @ (q.T @ m), m, atol=2e-4)                     # the same span
        np.testing.assert_allclose(q[:, 0], m[:, 0] / np.linalg.norm(m[:, 0]), rtol=1e-5)
        np.testing.assert_array_equal(ops.to_host(given), m)                        # functional
        assert (np.einsum("nr,nr->r", q, m) > 0).all()                              # Gram-Schmidt's signs


def check_orthogonalize_zero_column(ops):
    m = np.array([[3, 0], [4, 0]], F)
    np.testing.assert_allclose(ops.to_host(ops.orthogonalize(ops.from_host(m))), [[0.6, 0], [0.8, 0]], atol=1e-6)
    same(ops, ops.orthogonalize(give(ops, np.zeros((3, 2)))), np.zeros((3, 2)))


def check_orthogonalize_dependent_columns(ops):
    """Check that a dependent column is dropped, and does not become noise of length 1."""
    rng = np.random.default_rng(2)
    for scale in (1e-18, 1.0, 1e15):
        a, b = (rng.standard_normal(40).astype(F) * F(scale) for _ in range(2))
        q = ops.to_host(ops.orthogonalize(ops.from_host(np.stack([a, b, a - 2 * b, a * 3], axis=1))))
        np.testing.assert_allclose(q.T @ q, np.diag([1, 1, 0, 0]), atol=1e-5)


def check_orthogonalize_shows_what_is_not_finite(ops):
    """Also alone among zeros, where Householder's method takes the column for one that is done."""
    for r, bad, where in itertools.product((1, 4), (np.nan, np.inf, -np.inf),
                                           ((0, 0), (3, -1), (29, 0), (0, slice(None)), (17, slice(None)))):
        for m in (np.random.default_rng(3).standard_normal((30, r)).astype(F), np.zeros((30, r), F)):
            m[where] = bad
            with np.errstate(all="ignore"):
                q = ops.to_host(ops.orthogonalize(ops.from_host(m)))
                assert not np.isfinite(q.sum(axis=1)).any(), (r, bad, where)


def check_sum_squares(ops):
    got = ops.to_host(ops.sum_squares(give(ops, [[3.0, -4.0], [0.0, 12.0]])))
    assert got.shape == () and float(got) == 169.0
    assert float(ops.to_host(ops.sum_squares(give(ops, [300.0] * 4, "float16")))) == 360000.0
    assert float(ops.to_host(ops.sum_squares(give(ops, [])))) == 0.0
    assert np.isnan(float(ops.to_host(ops.sum_squares(give(ops, [1.0, float("nan")])))))


def check_total(ops):
    """In float64 and in order: 2**53 takes no 1, and a narrower sum would lose the 1 beside 2**25."""
    scalars = [ops.sum_squares(give(ops, [x])) for x in (2.0**12.5, 1.0)]
    assert float(ops.total(scalars)) == float(scalars[0]) + 1.0
    wide = [ops.cast(give(ops, 2.0**53), "float64"), *[ops.cast(give(ops, 1.0), "float64")] * 2]
    assert float(ops.total(wide)) == 2.0**53 and float(ops.total(wide[::-1])) == 2.0**53 + 2
    assert float(ops.total([])) == 0.0 and np.isnan(float(ops.total([wide[1], ops.sum_squares(give(ops, [np.nan]))])))


def check_abs_max(ops):
    got = ops.to_host(ops.abs_max(give(ops, [1.0, -7.5, 3.0])))
    assert got.shape == () and float(got) == 7.5
    assert float(ops.to_host(ops.abs_max(give(ops, [0.0, -0.0])))) == 0.0


def check_abs_max_rows(ops):
    x = np.array([[1.0, -7.5, 3.0], [0, -0.0, 0], [2.0, 1.0, -1.0]], F)
    same(ops, ops.abs_max_rows(ops.from_host(x)), [7.5, 0, 2], "float32")
    for column in range(40):  # vectorised maxima may lose a NaN in some places and keep it in others
        wide = np.ones((2, 40), F)
        wide[0, column] = np.nan
        wide[1, column] = -np.inf
        same(ops, ops.abs_max_rows(ops.from_host(wide)), [np.nan, np.inf])


def check_round(ops):
    same(ops, ops.round(give(ops, [0.5, 1.5, 2.5, -0.5, -1.5, 1.2, -1.8])), [0, 2, 2, 0, -2, 1, -2], "float32")


def check_all_finite(ops):
    def ask(values):
        got = ops.to_host(ops.all_finite(give(ops, values)))
        assert got.shape == () and got.dtype == np.bool_
        return bool(got)

    assert ask([1.0, -3e38, 0.0]) and ask([])
    assert not ask([1.0, float("nan")]) and not ask([float("inf"), 1.0]) and not ask([float("-inf")])
    assert not ask([[1.0, 2.0], [float("nan"), 0.0]])


def check_arithmetic(ops):
    a, b = give(ops, [1.0, -2.0, 4.0]), give(ops, [2.0, 2.0, -8.0])
    same(ops, a + b, [3, 0, -4])
    same(ops, a - b, [-1, -4, 12])
    same(ops, a * b, [2, -4, -32])
    same(ops, b / a, [2, -1, -2])
    same(ops, abs(a), [1, 2, 4])
    same(ops, a * 0.5, [0.5, -1, 2], "float32")


def check_select(ops):
    x, y = give(ops, [1.0, 2.0]), give(ops, [3.0, 4.0])
    same(ops, ops.select(ops.all_finite(x), x, y), [1, 2], "float32")
    same(ops, ops.select(ops.all_finite(x * float("inf")), x, y), [3, 4], "float32")


def check_cell(ops):
    cell, other = ops.cell(give(ops, [[1.0, 2.0]])), ops.cell(give(ops, [[1.0, 2.0]]))
    first = cell.read()
    cell.write(first * 3)
    second = cell.read()
    cell.write(second + second)
    same(ops, cell.read(), [[6, 12]], "float32")
    for read, want in ((first, [[1, 2]]), (second, [[3, 6]]), (other.read(), [[1, 2]])):
        same(ops, read, want, "float32")  # a write leaves alone what was read before, and other cells
    cell.write(first)
    same(ops, cell.read(), [[1, 2]])


def check_cell_of_each_type(ops):
    for dtype in ("float32", "float64", "int32", "int8"):
        cell = ops.cell(ops.zeros(3, dtype))
        cell.write(give(ops, [1, 2, 3], dtype))
        same(ops, cell.read(), [1, 2, 3], dtype)


def check_arguments_are_left_alone(ops):
    x = give(ops, [2.5, -1.0, 3.5, 2.5])
    for call in (lambda: ops.cast(x, "float16"), lambda: ops.round(x), lambda: ops.topk(x, 2), lambda: ops.bits16(x),
                 lambda: ops.sum_squares(x), lambda: ops.abs_max(x), lambda: ops.pack([x, x]),
                 lambda: ops.all_finite(x)):
        call()
        same(ops, x, [2.5, -1.0, 3.5, 2.5], "float32")


CASES = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


def name_of(check):
    """pytest id of a case."""
    return check.__name__.removeprefix("check_")
