// Forward on Hopper: out = softmax(mask(score(q kᵀ))) v and its lse. A thread block takes one work tile after another,
// each a query block of some head. Key tiles go from the last to the first.
//
//   s = q kᵀ                 wgmma, columns of q from registers where they are there
//   p = exp2(s c - shift)    softmax.cuh
//   o = o * o_scale + p v    wgmma, p from registers
//
// Schedule (time to the right; ⟂ waits)
//   warp 0        | k(n-1) ⟂ kv_empty | v(n) ⟂ kv_empty | …
//   q warps       | q of the next work tile ⟂ q_empty | …
//   scheduler     | the next work tile ⟂ requested | …
//   tensor cores  | s = q k(n)ᵀ | o += p(n+1) v(n+1) ────────── | s = q k(n-1)ᵀ | …
//   consumer      | issue both ⟂ kv_full | ⟂ s | p(n), its sums | ⟂ o | pack p(n) | …    2 or 3 of them, out of phase
//   between work  | s of the next work tile's first keys, o += p v of the last | its p | ⟂ o | out → smem → TMA, lse
//   Without kNextScoresFirst, that p v goes before that s, and out is stored beside the s.
//
// Roles    warpgroup 0, producers: producer.cuh, varlen_producer.cuh
//            warp 0               copies k and v (only k if keys lie in pages); schedules dense work tiles
//            warps 1 … kQueryWarps copy q
//            warp 2               copies v, if keys lie in pages
//            warp 3               schedules varlen or block-sparse work tiles (scheduler.cuh, varlen_scheduler.cuh)
//          the others, consumers: mainloop.cuh, epilogue.cuh. Each computes 64 queries of the block with all keys. A
//          step issues s of tile n and p v of tile n + 1; the softmax of that s then runs beside p v.
//
// Barriers in memory (storage.cuh)
//            work_full            a work tile, or the end marker, is published
//            requested            (varlen or block-sparse) the scheduler may publish the next work tile
//            q_full, q_empty      q of a warpgroup has arrived; its warps have released it
//            kv_full, kv_empty    k or v has arrived; all consumer warps have released it
//            edge_full            (varlen) v has arrived, but warp 0 or 2 must still zero the first keys of the tile
//          named (NamedBarrier in storage.cuh)
//            kIssue + group       (kPingPong) the warpgroup may issue its products; others compute their softmax
//            kBarriersMade        (varlen) warp 1 has initialised the barriers in memory; the scheduler may publish
//            kFirstWork           (varlen) the first work tile is published; all warps but the scheduler wait
//            __syncthreads()      (dense) warp 1 has initialised the barriers in memory
#include "epilogue.cuh"
#include "roles.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ KernelParams params) {
  run_roles<ForwardConsumer>(params);
}
