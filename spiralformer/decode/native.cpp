// Linear layers and stacks of GPT-NeoX blocks for a few rows, bound by reading the weights once.
// Float32 sums, whatever the weights' type.
//
// Shapes: P rows (of one or more groups), D width, H heads, K head size, C capacity.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>

using Vec = at::vec::Vectorized<float>;

typedef float vec __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));

static const int64_t AHEAD = 32768;  // bytes that are asked for before they are needed
static const int64_t NEAR = 512;  // weights asked for ahead where one output is read at a time

// ---------------------------------------------------------------------------- vectors

static inline vec load(const float* p) {
  vec v;
  __builtin_memcpy(&v, p, 32);
  return v;
}

static inline vec load(const at::BFloat16* p) {
  halves h;
  __builtin_memcpy(&h, p, 16);
  words w = __builtin_convertvector(h, words) << 16;
  vec v;
  __builtin_memcpy(&v, &w, 32);
  return v;
}

static inline void store(float* p, vec v) { __builtin_memcpy(p, &v, 32); }

static inline float sum(vec v) {
  vec4 a, b;
  __builtin_memcpy(&a, &v, 16);
  __builtin_memcpy(&b, (const char*)&v + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

template <typename A, typename B>
static float dot(const A* a, const B* b, int64_t n) {
  vec acc = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) acc += load(a + i) * load(b + i);
  float s = sum(acc);
  for (; i < n; i++) s += float(a[i]) * float(b[i]);
  return s;
}

// y += c·x
template <typename T>
static void add(float* y, float c, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store(y + i, load(y + i) + c * load(x + i));
  for (; i < n; i++) y[i] += c * float(x[i]);
}

static void softmax(float* x, int64_t n) {
  const float peak = *std::max_element(x, x + n);
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    (Vec::loadu(x + i, count) - Vec(peak)).exp().store(x + i, count);
  }
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i];
  for (int64_t i = 0; i < n; i++) x[i] /= total;
}

static void gelu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    const Vec v = Vec::loadu(x + i, count);
    (v * Vec(0.5f) * (Vec(1.f) + (v * Vec(float(M_SQRT1_2))).erf())).store(x + i, count);
  }
}

// ---------------------------------------------------------------------------- threads

struct Range {
  int64_t from, to;
};

// Every thread of a call and its place among them. Between two calls of `wait`, a thread writes only
// its own share of what the others read.
struct Team {
  int64_t index, size;

  // In units, so that a sum is the same however many threads there are.
  Range share(int64_t n, int64_t unit = 16) const {
    const int64_t units = (n + unit - 1) / unit;
    return {
        std::min(n, units * index / size * unit), std::min(n, units * (index + 1) / size * unit)};
  }
  void wait() const {
#pragma omp barrier
  }
};

template <typename F>
static void together(int64_t weights, const F& f) {
  const int most = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int threads = std::max<int64_t>(1, std::min<int64_t>(most, weights / 32768));
#pragma omp parallel num_threads(threads) if (threads > 1)
  f(Team{omp_get_thread_num(), omp_get_num_threads()});
}

// ---------------------------------------------------------------------------- linear layers

static const int64_t BLOCK = 32;  // weights taken at a time: one or two lines of cache

// Sixteen weights as two vectors. Two bfloat16 share a word, so a shift and a mask give the even
// and the odd ones; `arrange` puts x into the same order.
static inline void pair(const float* p, vec& a, vec& b) {
  a = load(p);
  b = load(p + 8);
}

static inline void pair(const at::BFloat16* p, vec& a, vec& b) {
  words w;
  __builtin_memcpy(&w, p, 32);
  words even = w << 16, odd = w & 0xffff0000u;
  __builtin_memcpy(&a, &even, 32);
  __builtin_memcpy(&b, &odd, 32);
}

// x (rows, K) in that order: itself, or a copy in `mine`.
template <typename T>
static const float* arrange(const float* x, int64_t rows, int64_t K, float* mine) {
  if (std::is_same<T, float>::value) return x;
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t m = 0; m < rows; m++, x += K, mine += K) {
    for (int64_t k = 0; k < whole; k += 16)
      for (int i = 0; i < 8; i++) {
        mine[k + i] = x[k + 2 * i];
        mine[k + 8 + i] = x[k + 2 * i + 1];
      }
    std::copy(x + whole, x + K, mine + whole);
  }
  return mine - rows * K;
}

// A linear layer, as it lies in memory.
template <typename T>
struct Linear {
  const T* w = nullptr;  // N K
  const T* bias = nullptr;  // N, or none
  int64_t N = 0, K = 0;

  Linear() = default;
  Linear(const at::Tensor& weight, const std::optional<at::Tensor>& b)
      : w(weight.const_data_ptr<T>()),
        bias(b ? b->const_data_ptr<T>() : nullptr),
        N(weight.size(0)),
        K(weight.size(1)) {}
};

// Outputs n … n+R-1 of M rows, added to y or written there: a row of w is used for all of them while
// it is in registers. Each has U partial sums, so that one addition does not wait for the other.
template <typename T, int M, int R, int U>
static void outputs(
    const float* x, const Linear<T>& layer, float* y, bool added, int64_t n, const T* ahead) {
  const int64_t K = layer.K, N = layer.N;
  const T* w = layer.w;
  vec acc[R][M][U] = {};
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t k = 0; k < whole; k += BLOCK)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const T* p = w + (n + r) * K + k;
#pragma GCC unroll 2
      for (int64_t line = 0; line < BLOCK; line += 64 / sizeof(T))
        __builtin_prefetch(ahead + r * K + k + line);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        vec a, b;
        pair(p + 16 * half, a, b);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          acc[r][m][2 * half % U] += a * load(x + m * K + k + 16 * half);
          acc[r][m][(2 * half + 1) % U] += b * load(x + m * K + k + 16 * half + 8);
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) {
      vec all = acc[r][m][0];
      for (int u = 1; u < U; u++) all += acc[r][m][u];
      float s = sum(all);
      for (int64_t k = whole; k < K; k++) s += float(w[(n + r) * K + k]) * x[m * K + k];
      float& to = y[m * N + n + r];
      to = s + (layer.bias ? float(layer.bias[n + r]) : 0.f) + (added ? to : 0.f);
    }
}

// A thread's outputs of all rows. Its part of w ends before `next` begins, which is what it reads
// afterwards: it goes on to ask for its part there.
template <typename T, int R, int U>
static void share_of_product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  const int64_t K = layer.K, far = AHEAD / int64_t(sizeof(T)), near = R == 1 ? NEAR : far;
  const auto [from, to] = team.share(layer.N);
  const T* then = next.w ? next.w + team.share(next.N).from * next.K : layer.w;
  auto all_rows = [&](auto count, int64_t n, const T* ahead) {
    constexpr int C = decltype(count)::value;
    for (int64_t m = 0; m < rows; m += 4) {
      const float* px = x + m * K;
      float* py = y + m * layer.N;
      switch (rows - m) {
        case 1: outputs<T, 1, C, U>(px, layer, py, added, n, ahead); break;
        case 2: outputs<T, 2, C, U>(px, layer, py, added, n, ahead); break;
        case 3: outputs<T, 3, C, U>(px, layer, py, added, n, ahead); break;
        default: outputs<T, 4, C, U>(px, layer, py, added, n, ahead);
      }
    }
  };
  int64_t n = from;
  for (; n + R <= to; n += R) {
    const int64_t beyond = (n - to) * K + far;
    all_rows(std::integral_constant<int, R>(), n, beyond < 0 ? layer.w + n * K + near : then + beyond);
  }
  for (; n < to; n++) all_rows(std::integral_constant<int, 1>(), n, layer.w + n * K);
}

template <typename T>
static void product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  if (rows > 2)  // R·M·U sums in registers
    share_of_product<T, 2, 1>(x, rows, layer, y, added, next, team);
  else if (sizeof(T) == 2)
    share_of_product<T, 1, 2>(x, rows, layer, y, added, next, team);
  else
    share_of_product<T, 4, 1>(x, rows, layer, y, added, next, team);
}

// Runs f<float> or f<BFloat16> by the type of the weights.
#define BY_TYPE(weight, ...)                                                            \
  [&] {                                                                                 \
    TORCH_CHECK((weight).is_contiguous(), "spiralformer: weights must be contiguous");  \
    if ((weight).scalar_type() == at::kFloat) {                                         \
      using T = float;                                                                  \
      return __VA_ARGS__();                                                             \
    }                                                                                   \
    TORCH_CHECK(                                                                        \
        (weight).scalar_type() == at::kBFloat16,                                        \
        "spiralformer: weights must be float32 or bfloat16, not ", (weight).scalar_type()); \
    using T = at::BFloat16;                                                             \
    return __VA_ARGS__();                                                               \
  }()

static at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2 && x.scalar_type() == at::kFloat && x.is_contiguous()) return x;
  return x.reshape({-1, x.size(-1)}).to(at::kFloat).contiguous();
}

at::Tensor skinny_linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "skinny_linear: x and weight differ in dtype");
  TORCH_CHECK(x.size(-1) == w.size(1), "skinny_linear: x and weight differ in width");
  const at::Tensor from = as_rows(x);
  const int64_t rows = from.size(0);
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  at::Tensor y = at::empty({rows, w.size(0)}, from.options());
  BY_TYPE(w, [&] {
    const Linear<T> layer(w, bias);
    std::vector<float> buffer(rows * layer.K);
    const float* px = arrange<T>(from.const_data_ptr<float>(), rows, layer.K, buffer.data());
    float* py = y.mutable_data_ptr<float>();
    together(w.numel(), [&](const Team& team) {
      product<T>(px, rows, layer, py, false, Linear<T>(), team);
    });
  });
  return y.to(x.scalar_type()).view(shape);
}

// ---------------------------------------------------------------------------- a stack of blocks

template <typename T>
struct Norm {
  const T* w;
  const T* bias;  // RMSNorm has none
  float eps;

  Norm(const at::Tensor& weight, const std::optional<at::Tensor>& b, double eps)
      : w(weight.const_data_ptr<T>()), bias(b ? b->const_data_ptr<T>() : nullptr), eps(eps) {}

  void operator()(const float* from, float* to, int64_t rows, int64_t D) const {
    for (int64_t m = 0; m < rows; m++, from += D, to += D) {
      float mean = 0;
      if (bias) {
        for (int64_t i = 0; i < D; i++) mean += from[i];
        mean /= D;
      }
      for (int64_t i = 0; i < D; i++) to[i] = from[i] - mean;
      const float scale = 1 / std::sqrt(dot(to, to, D) / D + eps);
      for (int64_t i = 0; i < D; i++) to[i] = to[i] * scale * float(w[i]);
      if (bias)
        for (int64_t i = 0; i < D; i++) to[i] += float(bias[i]);
    }
  }
};

// The first 2·half dimensions of a head, half against half; `rope` has cosines, then sines.
static void rotate(float* x, const float* rope, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = rope[i], s = rope[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

// Where the next entry of a row goes, in the keys and values of its group.
template <typename T>
struct Place {
  T* keys;  // of the first layer and head
  T* values;
  int64_t position, capacity;
  int64_t layer_stride;
};

// Stores the new key and value of each row and attends to all it has: a thread's share of the heads.
template <typename T>
static void attend(
    float* qkv, const std::vector<float>& rope, const std::vector<Place<T>>& places, int64_t layer,
    int64_t H, int64_t K, float* out, const Team& team) {
  const int64_t half = rope.size() / places.size() / 2;
  const float scale = 1 / std::sqrt(float(K));
  std::vector<float> scores;
  const auto [from, to] = team.share(places.size() * H, 1);
  for (int64_t i = from; i < to; i++) {
    const int64_t p = i / H, head = i % H;
    const Place<T>& place = places[p];
    const int64_t base = layer * place.layer_stride + head * place.capacity * K;
    T* k = place.keys + base;
    T* v = place.values + base;
    float* q = qkv + (3 * p * H + head) * K;
    float* new_k = q + H * K;
    float* new_v = new_k + H * K;
    rotate(q, rope.data() + 2 * p * half, half);
    rotate(new_k, rope.data() + 2 * p * half, half);
    for (int64_t j = 0; j < K; j++) {
      k[place.position * K + j] = T(new_k[j]);
      v[place.position * K + j] = T(new_v[j]);
    }
    const int64_t count = place.position + 1;
    scores.resize(count);
    for (int64_t j = 0; j < count; j++) scores[j] = scale * dot(q, k + j * K, K);
    softmax(scores.data(), count);
    float* y = out + (p * H + head) * K;
    std::fill_n(y, K, 0.f);
    for (int64_t j = 0; j < count; j++) add(y, scores[j], v + j * K, K);
  }
}

template <typename T>
struct Layer {
  Norm<T> attention_norm, mlp_norm;
  Linear<T> qkv, out, up, down;
};

// A stack, ready to be run: weights of attention_norm, qkv, out, mlp_norm, up and down of each layer.
struct Stack : torch::CustomClassHolder {
  c10::List<std::optional<at::Tensor>> weights;  // weight and bias of each, kept alive
  at::Tensor frequencies;
  int64_t heads;
  bool parallel;
  std::vector<Layer<float>> floats;
  std::vector<Layer<at::BFloat16>> halves;

  Stack(
      c10::List<std::optional<at::Tensor>> all, at::Tensor frequencies, int64_t heads, double eps,
      bool parallel)
      : weights(all), frequencies(frequencies), heads(heads), parallel(parallel) {
    BY_TYPE(all.get(0).value(), [&] {
      auto norm = [&](size_t i) { return Norm<T>(all.get(i).value(), all.get(i + 1), eps); };
      auto linear = [&](size_t i) { return Linear<T>(all.get(i).value(), all.get(i + 1)); };
      for (size_t i = 0; i < all.size(); i += 12)
        layers<T>().push_back(
            {norm(i), norm(i + 6), linear(i + 2), linear(i + 4), linear(i + 8), linear(i + 10)});
    });
  }

  template <typename T>
  std::vector<Layer<T>>& layers() {
    if constexpr (std::is_same_v<T, float>) return floats;
    else return halves;
  }

  // One token of each row, x (P, D): its keys and values go to place `positions` of row `rows` of
  // the cache (N, B, H, C, K) that has this part of the rows, `sizes` in turn.
  at::Tensor run(
      const at::Tensor& x, const std::vector<at::Tensor>& keys, const std::vector<at::Tensor>& values,
      const std::vector<int64_t>& sizes, const std::vector<int64_t>& rows,
      const std::vector<int64_t>& positions) {
    const at::Tensor from = as_rows(x);
    at::Tensor h = from.is_alias_of(x) ? from.clone() : from;  // x stays as it is
    BY_TYPE(weights.get(0).value(), [&] {
      std::vector<Place<T>> places;
      for (size_t group = 0, p = 0; group < sizes.size(); group++)
        for (int64_t i = 0; i < sizes[group]; i++, p++) {
          const at::Tensor &k = keys[group], &v = values[group];
          TORCH_CHECK(
              k.is_contiguous() && v.is_contiguous() && rows.at(p) < k.size(1) &&
                  positions.at(p) < k.size(3),
              "spiralformer: entry ", positions[p], " of row ", rows[p], " is outside its cache");
          const int64_t offset = rows[p] * k.stride(1);
          places.push_back(
              {k.mutable_data_ptr<T>() + offset, v.mutable_data_ptr<T>() + offset, positions[p],
               k.size(3), k.stride(0)});
        }
      TORCH_CHECK(int64_t(places.size()) == h.size(0), "spiralformer: rows and places differ");
      through<T>(h.mutable_data_ptr<float>(), places);
    });
    return h.to(x.scalar_type()).view(x.sizes());
  }

  template <typename T>
  void through(float* h, const std::vector<Place<T>>& places) {
    const auto& all = layers<T>();
    const int64_t P = places.size(), D = all[0].qkv.K, wide = all[0].up.N, H = heads;
    const float* angle = frequencies.const_data_ptr<float>();
    std::vector<float> rope;  // of each row, cosines, then sines
    for (const Place<T>& place : places)
      for (auto turn : {+[](float a) { return std::cos(a); }, +[](float a) { return std::sin(a); }})
        for (int64_t i = 0; i < frequencies.numel(); i++)
          rope.push_back(turn(float(place.position) * angle[i]));
    std::vector<float> buffer(P * (4 * D + wide));
    float* qkv = buffer.data();
    float* attended = qkv + 3 * P * D;
    float* up = attended + P * D;
    together(wide * D, [&](const Team& team) {
      std::vector<float> normed(P * D), mine(P * std::max(D, wide));
      auto arranged = [&](const float* from, int64_t width) {
        return arrange<T>(from, P, width, mine.data());
      };
      for (size_t i = 0; i < all.size(); i++) {
        const Layer<T>& layer = all[i];
        const Linear<T> after = i + 1 < all.size() ? all[i + 1].qkv : Linear<T>();
        auto mlp_up = [&](const Linear<T>& next) {
          layer.mlp_norm(h, normed.data(), P, D);
          product<T>(arranged(normed.data(), D), P, layer.up, up, false, next, team);
          const auto [from, to] = team.share(wide);
          for (int64_t p = 0; p < P; p++) gelu(up + p * wide + from, to - from);
        };
        layer.attention_norm(h, normed.data(), P, D);
        const Linear<T>& second = parallel ? layer.up : layer.out;
        product<T>(arranged(normed.data(), D), P, layer.qkv, qkv, false, second, team);
        if (parallel) mlp_up(layer.out);
        team.wait();
        attend<T>(qkv, rope, places, i, H, D / H, attended, team);
        team.wait();
        const Linear<T>& third = parallel ? layer.down : layer.up;
        product<T>(arranged(attended, D), P, layer.out, h, true, third, team);
        if (!parallel) {
          team.wait();
          mlp_up(layer.down);
          team.wait();
        }
        product<T>(arranged(up, wide), P, layer.down, h, true, after, team);
        team.wait();
      }
    });
  }
};

TORCH_LIBRARY(spiralformer, m) {
  m.def("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.class_<Stack>("Stack")
      .def(torch::init<
           c10::List<std::optional<at::Tensor>>, at::Tensor, int64_t, double, bool>())
      .def("run", &Stack::run);
}
TORCH_LIBRARY_IMPL(spiralformer, CPU, m) { m.impl("skinny_linear", skinny_linear); }
