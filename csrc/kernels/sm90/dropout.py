"""Which probabilities dropout keeps, in the Hopper kernels: the same bits as portable/dropout.py.

A call of Philox gives the words of four neighbouring keys of a row, whose probabilities two or four
threads have. These threads divide the calls among them and exchange the bits that result, one for
each column of a thread (common.range_bits_asm). What the first three rounds compute from the key or
the row alone is computed once for the two calls of a pass, or before the loop. Loops are not
unrolled, because they run while products are in flight and must leave them their registers.

Registers of the assembly: k, the words of the random key; b and h, those of batch row and head; c,
the number of four keys; s, the words of two calls; a, bits of words 0 and 1, and of 2 and 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# 64 numbers, two for each lane of every warp: number `lane`, and number 32 + lane
PER_LANE = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, 4], [1, 0])))


@gluon.jit
def stream_of_head(dropout, b, heads, head):
    """Pointer to the four words of a head."""
    return dropout.streams + (b.to(gl.int64) * heads + head) * 4


@gluon.jit
def row_numbers(dropout, b, rows, q_len):
    first = dropout.rows + gl.where(dropout.rows_batch > 1, b, 0).to(gl.int64) * q_len
    return gl.load(first + rows, mask=rows < q_len, other=0)


@gluon.constexpr_function
def product(low, high, x, of):
    """The two words of x times the multiplier of words 0 (of 0) or 2 (of 1) of a counter."""
    multiplier = (0xD2511F53, 0xCD9E8D57)[of]
    return f"mul.wide.u32 w, {x}, {multiplier}; mov.b64 {{{low}, {high}}}, w;"


@gluon.constexpr_function
def xor(out, *x):
    return f"lop3.b32 {out}, {', '.join(x)}, 0x96;"


@gluon.constexpr_function
def round_key(of, i):
    """Sets t0 or t1 to a word of the key of round i, counted from 0."""
    step = (0x9E3779B9, 0xBB67AE85)[of]
    return f"add.u32 t{of}, k{of}, {step * i % 2**32};"


@gluon.constexpr_function
def begin(stream):
    """Declares the registers and loads a stream."""
    return [
        "{ .reg .b64 w; .reg .pred p, odd, upper; .reg .b32 k<2>, t<2>, b, h, hl, hh, c, x, y, z,"
        " u, v, d<2>, e<2>, f<4>, s<8>, a<4>, bit<2>, q, n<2>;",
        f"ld.global.v4.u32 {{k0, k1, b, h}}, [{stream}];",
        product("hl", "hh", "h", 1),
        *(f"mov.b32 a{i}, 0;" for i in range(4)),
    ]


@gluon.constexpr_function
def keys_alone():
    """From the keys c: y and z, low words of rounds 0 and 1, and u and v, the words of round 2."""
    return [
        product("y", "x", "c", 0), xor("x", "x", "b", "k1"), product("z", "x", "x", 1),
        round_key(0, 1), xor("x", "x", "hl", "t0"), product("u", "v", "x", 0),
    ]  # fmt: skip


@gluon.constexpr_function
def row_alone(i, number):
    """From the row of call i: e and d, the words of round 1."""
    return [xor("x", number, "hh", "k0"), product(f"e{i}", f"d{i}", "x", 0)]


@gluon.constexpr_function
def collect(threshold):
    """The rest of both calls. Sets bit0 of a for words 0 and 2, and bit1 for words 1 and 3."""
    calls = ("s0", "s1", "s2", "s3"), ("s4", "s5", "s6", "s7")
    t = [round_key(1, 1)]
    for i, s in enumerate(calls):
        t += [xor("x", f"d{i}", "y", "t1"), product(s[1], s[0], "x", 1)]
    t += [round_key(0, 2), round_key(1, 2)]
    for i, s in enumerate(calls):
        t += [xor(s[0], s[0], "z", "t0"), xor(s[2], f"e{i}", "v", "t1"), f"mov.b32 {s[3]}, u;"]
    for n in range(3, 10):
        t += [round_key(0, n), round_key(1, n)]
        for s in calls:
            t += [product("f0", "f1", s[0], 0), product("f2", "f3", s[2], 1)]
            t += [xor(s[0], "f3", s[1], "t0"), xor(s[2], "f1", s[3], "t1")]
            t.append(f"mov.b32 {s[1]}, f2; mov.b32 {s[3]}, f0;")
    for j in range(8):
        a, bit = f"a{j // 2}", f"bit{j % 2}"
        t.append(f"setp.ge.u32 p, s{j}, {threshold}; @p or.b32 {a}, {a}, {bit};")
    return t


@gluon.constexpr_function
def row_keep_bits_asm(n):
    """Bits of rows x n keys. Operands: bits (2), row numbers (2), pointer to the stream, first key
    (a multiple of 4), threshold.

    In a pass over 16 keys, an even thread computes four keys of the first octet and an odd thread
    four of the second: its own columns, and those of its neighbour, in both rows. It then gives the
    neighbour the bits of two of them.
    """
    t = begin("$4")
    for r in (0, 1):
        t += row_alone(r, f"${2 + r}")
    t.append(
        "mov.u32 q, %laneid; and.b32 x, q, 1; setp.ne.u32 odd, x, 0; shl.b32 x, x, 1;"
        "and.b32 q, q, 2; shr.u32 q, q, 1; shr.u32 c, $5, 2; add.u32 c, c, x; add.u32 c, c, q;"
        "mov.b32 bit0, 1; mov.b32 bit1, 2; LOOP:"
    )
    t += keys_alone() + collect("$6")
    t.append(
        "add.u32 c, c, 4; shl.b32 bit0, bit0, 4; shl.b32 bit1, bit1, 4;"
        f"setp.ne.u32 p, bit0, {(1 << n // 4) % 2**32}; @p bra LOOP;"
    )
    for r, (a, b) in enumerate((("a0", "a1"), ("a2", "a3"))):
        t.append(
            f"selp.b32 x, {a}, {b}, odd; shfl.sync.bfly.b32 x, x, 1, 31, -1;"
            f"selp.b32 y, x, {a}, odd; selp.b32 z, {b}, x, odd;"
            f"shl.b32 z, z, 2; or.b32 ${r}, y, z;"
        )
    return " ".join(t) + " }"


@gluon.constexpr_function
def key_keep_bits_asm():
    """Bits of keys x 64 rows. Operands: bits (2), keys (2), row numbers as PER_LANE (2), pointer to
    the stream, threshold.

    Four threads have four neighbouring keys and another four, 8 later, in two rows of each octet.
    The second and fourth of them compute the second of these rows, the third and fourth the later
    keys.
    """
    t = begin("$6")
    t.append(
        "mov.u32 q, %laneid; shr.u32 x, q, 2; and.b32 n0, x, 1; setp.ne.u32 odd, n0, 0;"
        "and.b32 x, x, 2; setp.ne.u32 upper, x, 0; shr.u32 c, $2, 2; add.u32 c, c, x;"
        "and.b32 q, q, 3; shl.b32 q, q, 1; add.u32 q, q, n0; mov.b32 bit0, 1;"
        "mov.b32 bit1, 0x10000;"
    )
    t += [*keys_alone(), "LOOP:"]
    for i in (0, 1):
        t.append(f"shfl.sync.idx.b32 n{i}, ${4 + i}, q, 31, -1;")
        t += row_alone(i, f"n{i}")
    t += collect("$7")
    t.append(
        "add.u32 q, q, 8; shl.b32 bit0, bit0, 2; shl.b32 bit1, bit1, 2;"
        "setp.ne.u32 p, bit0, 0x100; @p bra LOOP;"
    )
    for a, b in (("a0", "a2"), ("a1", "a3")):  # 16 bits of each of two keys, in both rows
        t.append(
            f"shl.b32 {b}, {b}, 8; or.b32 {a}, {a}, {b}; shl.b32 {b}, {a}, 1;"
            f"selp.b32 {a}, {b}, {a}, odd; shfl.sync.bfly.b32 {b}, {a}, 4, 31, -1;"
            f"or.b32 {a}, {a}, {b};"
        )
    t.append(
        "selp.b32 y, a0, a1, upper; selp.b32 x, a1, a0, upper;"
        "shfl.sync.bfly.b32 y, y, 8, 31, -1; shr.u32 z, x, 16; selp.b32 x, z, x, odd;"
        "shr.u32 z, y, 16; selp.b32 y, z, y, odd;"
        "selp.b32 $0, y, x, upper; selp.b32 $1, x, y, upper;"
    )
    return " ".join(t) + " }"


@gluon.jit
def row_keep_bits(numbers, stream, first, args, N: gl.constexpr):
    """Which of the N keys from `first` on are kept, for rows with these numbers."""
    operands = (numbers, stream, first, args.dropout.threshold)
    letters: gl.constexpr = "=&r,=&r,r,r,l,r,r"
    return gl.inline_asm(row_keep_bits_asm(N), letters, operands, numbers.type, is_pure=True)


@gluon.jit
def key_keep_bits(keys, head, row, args):
    """In which of the 64 rows from `row` on of a head the keys are kept."""
    dropout = args.dropout
    b = args.tile.b
    numbers = row_numbers(dropout, b, row + gl.arange(0, 64, PER_LANE), args.scalars.q_len)
    stream = stream_of_head(dropout, b, args.scalars.heads, head)
    operands = (keys, numbers, stream, dropout.threshold)
    letters: gl.constexpr = "=&r,=&r,r,r,r,r,l,r"
    return gl.inline_asm(key_keep_bits_asm(), letters, operands, keys.type, is_pure=True)


@gluon.constexpr_function
def keep_pairs_asm(outputs, inputs):
    """Clears packed values whose bit is 0. The bits of four octets are moved to the signs of four
    bytes, and a permutation spreads each sign over the value. Operands: pairs, pairs, bits (2)."""
    (o,) = outputs
    x, bits = inputs
    t = ["{ .reg .b32 even, odd, m;"]
    for shift in range(4):  # of octets shift, 4 + shift, ...
        for r in (0, 1):
            t.append(f"shl.b32 even, {bits[r]}, {7 - 2 * shift};")
            t.append(f"shl.b32 odd, {bits[r]}, {6 - 2 * shift};")
            for i in range(2 * shift + r, len(x), 8):
                byte = i // 8
                spread = 0xCC88 + 0x1111 * byte
                t.append(f"prmt.b32 m, even, odd, {spread}; and.b32 {o[i]}, {x[i]}, m;")
    return " ".join(t) + " }"


@gluon.jit
def keep_pairs(p, bits):
    """P as pairs of 16 bits (softmax.py), with 0 where it is dropped."""
    return gl.inline_asm(keep_pairs_asm, ("=&r", "r", "r"), (p, bits), p.type, is_pure=True)
