// Where every byte of a packed tensor lies: the index functions of fu_compile/formats.py, for host and device.
//
// No includes and no CUDA: g++ compiles this file as it stands, and tests/numerics/test_layout.py compares every
// function bit for bit with the Python side. Pictures of the layouts are in formats.py (pack_int4, encode_rows,
// kv_store).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FU_HD __host__ __device__ __forceinline__
#else
#define FU_HD inline
#endif

namespace fu {

constexpr int kTileN = 16;          // output rows of a weight tile: M of mma.m16n8k16
constexpr int kTileK = 128;         // input columns of a weight tile: eight k16 steps
constexpr int kNibbleBytes = 1024;  // kTileN * kTileK / 2
constexpr int kVectorBytes = 512;   // one 16-byte vector of each of the 32 lanes
constexpr int kPage = 64;           // tokens in a page of the INT4 cache
constexpr int kHadamardCap = 32;    // largest Hadamard block
constexpr int kFp8History = 16;     // amaxes in an FP8 activation state, newest first
constexpr int kFp8State = 24;       // floats in an FP8 activation state
constexpr int kFp8Scale = 16;       // the scalars behind the history
constexpr int kFp8Calls = 17;
constexpr int kFp8Saturations = 18;
constexpr int kFp8Frozen = 19;
constexpr int kFp8NonFinite = 20;

FU_HD constexpr long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

// ---- INT4 weights ---------------------------------------------------------------------------------------------------

// Bytes of one tile record: codes, then 16 f16 scales and 16 u8 zeros for each of the 128 / group groups.
FU_HD constexpr int int4_tile_bytes(int group) { return kNibbleBytes + (kTileK / group) * kTileN * 3; }

FU_HD constexpr long long int4_bytes(long long n, long long k, int group) {
    return ceil_div(n, kTileN) * ceil_div(k, kTileK) * int4_tile_bytes(group);
}

// First byte of the tile that holds weight (row, col) of an [n, k] matrix. Tiles of a strip follow each other along K.
FU_HD constexpr long long int4_tile_offset(long long row, long long col, long long k, int group) {
    return ((row / kTileN) * ceil_div(k, kTileK) + col / kTileK) * int4_tile_bytes(group);
}

// Nibble inside the tile of weight (r, c), r < 16, c < 128: byte = nibble / 2, the low half first.
// lane = 4 (r % 8) + (c % 32) / 8 owns it in step 2 (c / 32) + (c % 8) / 4; vector = step / 4; in the 32-bit word of a
// step the low halves of fragment registers 0, 2, 1, 3 are nibbles 0..3 and the high halves (odd columns) nibbles 4..7.
FU_HD constexpr int int4_nibble(int r, int c) {
    const int lane = (r % 8) * 4 + (c % 32) / 8;
    const int step = (c / 32) * 2 + (c % 8) / 4;
    const int word = (step / 4) * (kVectorBytes / 4) + lane * 4 + step % 4;
    return word * 8 + (c % 2) * 4 + (r / 8) * 2 + (c % 4) / 2;
}

// Place of row r among the 16 scales (and zeros) of a group: rows g and g + 8, which one lane needs, side by side.
FU_HD constexpr int int4_row(int r) { return (r % 8) * 2 + r / 8; }

// Byte inside the tile of the f16 scale, and of the u8 zero (stored times 8), of row r and column c.
FU_HD constexpr int int4_scale(int r, int c, int group) {
    return kNibbleBytes + ((c / group) * kTileN + int4_row(r)) * 2;
}

FU_HD constexpr int int4_zero(int r, int c, int group) {
    return kNibbleBytes + (kTileK / group) * kTileN * 2 + (c / group) * kTileN + int4_row(r);
}

// The whole matrix: nibble index (2 * byte + half), and bytes of scale and zero, of weight (row, col).
FU_HD constexpr long long int4_nibble_at(long long row, long long col, long long k, int group) {
    return 2 * int4_tile_offset(row, col, k, group) + int4_nibble(int(row % kTileN), int(col % kTileK));
}

FU_HD constexpr long long int4_scale_at(long long row, long long col, long long k, int group) {
    return int4_tile_offset(row, col, k, group) + int4_scale(int(row % kTileN), int(col % kTileK), group);
}

FU_HD constexpr long long int4_zero_at(long long row, long long col, long long k, int group) {
    return int4_tile_offset(row, col, k, group) + int4_zero(int(row % kTileN), int(col % kTileK), group);
}

// Row of [gate; up] that stands at packed row p of n: strips of 8 gate rows and the 8 up rows that go with them; the
// last n / 2 % 8 gate rows are followed by their up rows.
FU_HD constexpr long long interleaved_source(long long p, long long n) {
    const long long half = n / 2, whole = half / 8 * 8;
    if (p < 2 * whole) return (p / 16) * 8 + p % 8 + (p % 16 / 8) * half;
    const long long rest = p - 2 * whole, left = half - whole;
    return rest < left ? whole + rest : half + whole + (rest - left);
}

// ---- INT4 cache -----------------------------------------------------------------------------------------------------

// The largest power of two that divides head_dim, kHadamardCap at most (head_dim even).
FU_HD constexpr int hadamard_block(int head_dim) {
    const int block = head_dim & -head_dim;
    return block < kHadamardCap ? block : kHadamardCap;
}

// Nibble inside a row of head_dim / 2 bytes of column c: chunk t = c % 8 / 2 holds what lane t of a quad owns.
// A head_dim that is not a multiple of 8 is stored in natural order.
FU_HD constexpr int kv_nibble(int c, int head_dim) {
    return head_dim % 8 ? c : ((c % 8 / 2) * (head_dim / 8) + c / 8) * 2 + c % 2;
}

// Row (in units of head_dim / 2 bytes of codes, or of one f16 scale) of a token in [B, Hkv, pages, 64].
FU_HD constexpr long long kv_row(long long b, long long head, long long token, long long kv_heads, long long pages) {
    return ((b * kv_heads + head) * pages + token / kPage) * kPage + token % kPage;
}

FU_HD constexpr long long kv_pages(long long max_len) { return ceil_div(max_len, kPage); }

// Pages that are complete when `tokens` tokens are in the cache: what attention reads as quantised.
FU_HD constexpr long long kv_complete_pages(long long tokens) { return tokens / kPage; }

// ---- FP8 activations ------------------------------------------------------------------------------------------------

// Bits of the smallest normal power of two that is not below the float of these bits (>= 0, finite); 0 stays 0.
FU_HD constexpr unsigned power_of_two_bits(unsigned bits) { return (bits + 0x007fffffu) & 0xff800000u; }

}  // namespace fu
