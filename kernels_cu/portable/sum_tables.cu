// sum_tables: adds the tables of thread blocks into the gradient of an array.
//
//   result[element] = total[element] + Σ table[entry of the element], in a fixed order
//
// Roles    A thread owns an element; with few elements and many tables, the lanes of a warp share an element.
#include "../common/config.cuh"
#include "../common/gradient_sums.cuh"
#include "../common/params.cuh"

static_assert(sizeof(SumTablesParams) == kParamsBytes, "the host packs other parameters");

// Returns the index of an element's entry in a table, or -1 if it has none.
__device__ __forceinline__ long long place_of(const SumTablesParams& p, long long element) {
  long long place = 0;
#pragma unroll 1
  for (int axis = p.rank - 1; axis >= 0; --axis) {
    const long long above = element / p.extents[axis];
    const int index = static_cast<int>(element - above * p.extents[axis]) - p.firsts[axis];
    if (index < 0 || index >= p.counts[axis]) return -1;
    place += index * p.strides[axis];
    element = above;
  }
  return place;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ SumTablesParams p) {
  const long long thread = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  const long long element = thread / p.lanes;
  const bool exists = element < p.num_elements;
  const long long place = exists && p.num_tables > 0 ? place_of(p, element) : -1;
  float sum = 0.0f;
  if (place >= 0) {
    const float* const first = p.tables + place;
#pragma unroll 4
    for (int n = thread % p.lanes; n < p.num_tables; n += p.lanes) sum += first[n * p.table_step];
  }
  if (p.lanes == 32) sum = warp_sum(sum);
  if (!exists || thread % p.lanes != 0) return;
  if (p.adds) sum += p.total[element];
  if (p.result != nullptr) store_number(p.result, element, sum, p.result_kind);
  else p.total[element] = sum;
}
