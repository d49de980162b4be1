// wgmma: D = A B (+ D) on a warpgroup, asynchronous. The order is fence, multiply, commit, wait; threads may access the
// registers of D or A only after the wait. D is m64nN in float32, N / 2 registers per thread (common/fragment.cuh). A
// comes from shared memory (ss), or from registers (rs) as four pairs of 16-bit numbers per thread, as for
// mma.m16n8k16. B comes from shared memory.
#pragma once

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of this warpgroup's latest groups are in flight. d are the accumulators of a completed
// group; as operands they keep their reads behind the wait.
template <int kPending, int kCount>
__device__ __forceinline__ void wgmma_wait(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Returns the descriptor of an operand in shared memory: panels of [rows][64] 16-bit numbers with a 128-byte swizzle,
// aligned to 1024 bytes. The lower word holds the address and the distance of panels (for transposed operands wider
// than a panel), both in units of 16 bytes. The upper word holds the stride of 8 rows, 1024 bytes, and the swizzle
// mode. The steps below are added to the whole 64-bit descriptor: in uniform registers that is one instruction, a
// joined word is two (L14).
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned smem_address, unsigned panel_bytes = 16) {
  return static_cast<unsigned long long>(64u | 1u << 30) << 32 | smem_address >> 4 | panel_bytes >> 4 << 16;
}

// Returns the descriptor step to the 16 columns of step kk of an operand that is not transposed.
__device__ constexpr unsigned long long wgmma_columns(int kk, unsigned panel_bytes) {
  return kk / 4 * (panel_bytes / 16) + kk % 4 * 2;
}

// Returns the descriptor step to the 16 rows of step kk of a transposed operand.
__device__ constexpr unsigned long long wgmma_rows(int kk) { return kk * 128; }

// The products of one N. kTransA, kTransB: the rows of the operand in memory are the summed dimension.
template <int kN>
struct Wgmma;

// One product. I0 … are the operand numbers in the asm text; the accumulators follow.
#define WGMMA_SS(TYPES, N, REGS, I0, I1, I2, I3, I4, ...)                                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES \
               " {" REGS "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I4 ", %" #I3 ";}"                                   \
               : __VA_ARGS__                                                                                      \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransB)), "n"(int(kTransA)))
#define WGMMA_RS(TYPES, N, REGS, I0, I1, I2, I3, I4, I5, I6, ...)                                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES \
               " {" REGS "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";}"             \
               : __VA_ARGS__                                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransB)))

#define WGMMA_SHAPE(N, REGS, D, I0, I1, I2, I3, I4, I5, I6)                                                  \
  template <>                                                                                                \
  struct Wgmma<N> {                                                                                          \
    template <bool kIsFloat16, bool kTransB, bool kTransA = false>                                           \
    __device__ static __forceinline__ void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, \
                                              bool accumulate) {                                             \
      if constexpr (kIsFloat16) WGMMA_SS("f16.f16", N, REGS, I0, I1, I2, I3, I4, D);                         \
      else WGMMA_SS("bf16.bf16", N, REGS, I0, I1, I2, I3, I4, D);                                            \
    }                                                                                                        \
    template <bool kIsFloat16, bool kTransB>                                                                 \
    __device__ static __forceinline__ void rs(float (&d)[N / 2], const unsigned* a, unsigned long long b,    \
                                              bool accumulate) {                                             \
      if constexpr (kIsFloat16) WGMMA_RS("f16.f16", N, REGS, I0, I1, I2, I3, I4, I5, I6, D);                 \
      else WGMMA_RS("bf16.bf16", N, REGS, I0, I1, I2, I3, I4, I5, I6, D);                                    \
    }                                                                                                        \
  };

#define WGMMA_D8(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define WGMMA_D12 WGMMA_D8(0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_D16 WGMMA_D8(0), WGMMA_D8(8)
#define WGMMA_D24 WGMMA_D16, WGMMA_D8(16)
#define WGMMA_D32 WGMMA_D24, WGMMA_D8(24)
#define WGMMA_D40 WGMMA_D32, WGMMA_D8(32)
#define WGMMA_D48 WGMMA_D32, WGMMA_D8(32), WGMMA_D8(40)
#define WGMMA_D64 WGMMA_D48, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_D96 WGMMA_D64, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88)
#define WGMMA_D128 WGMMA_D96, WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120)
#define WGMMA_R12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define WGMMA_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_R24 WGMMA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_R32 WGMMA_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_R40 WGMMA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_R48 WGMMA_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_R64 WGMMA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_R80 WGMMA_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_R96 WGMMA_R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_R112 WGMMA_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_R128 WGMMA_R112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

WGMMA_SHAPE(24, WGMMA_R12, WGMMA_D12, 12, 13, 14, 15, 16, 17, 18)
WGMMA_SHAPE(32, WGMMA_R16, WGMMA_D16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SHAPE(48, WGMMA_R24, WGMMA_D24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SHAPE(64, WGMMA_R32, WGMMA_D32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPE(80, WGMMA_R40, WGMMA_D40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPE(96, WGMMA_R48, WGMMA_D48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SHAPE(128, WGMMA_R64, WGMMA_D64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPE(192, WGMMA_R96, WGMMA_D96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SHAPE(256, WGMMA_R128, WGMMA_D128, 128, 129, 130, 131, 132, 133, 134)
