// Autograd of pooling: the gradient of a sum is a sum over the opposite direction, that of max is put, whose own gradient
// is pick, whose own is put.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "ops.h"

namespace voxmma {

TensorList opposite_map(TensorList map, TensorList map_t, bool symmetric, const char* what) {
  if (symmetric) return map;
  TORCH_CHECK(!map_t.empty(), "map_t is empty, but ", what,
              " needs the map of the opposite direction (KernelMap.transposed().tensors)");
  return map_t;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a pooling op runs over: `map` is that from the inputs to the outputs.
struct Windows : Maps {
  int64_t volume;
  bool symmetric;

  void save(AutogradContext* ctx) const {
    save_maps(*this, ctx);
    ctx->saved_data["volume"] = volume;
    ctx->saved_data["symmetric"] = symmetric;
  }
  static Windows load(AutogradContext* ctx) {
    auto& data = ctx->saved_data;
    return {load_maps(ctx), data["volume"].toInt(), data["symmetric"].toBool()};
  }
};

class PoolSumFunction : public torch::autograd::Function<PoolSumFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& in_count, const OptTensor& out_count,
                        const Windows& over, const c10::SymInt& n_out, bool mirror) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({in_count.value_or(Tensor()), out_count.value_or(Tensor())});
    ctx->saved_data["mirror"] = mirror;
    ctx->saved_data["n_in"] = x.sym_size(0);
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_sum_op().call(x, in_count, out_count, over.map, over.map_t, over.volume, n_out, over.symmetric, mirror);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(6);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    auto& data = ctx->saved_data;
    const variable_list counts = ctx->get_saved_variables();
    const auto given = [](const Tensor& count) { return count.defined() ? OptTensor(count) : std::nullopt; };
    out[0] = pool_sum_op().call(grads[0], given(counts[1]), given(counts[0]),
                                opposite_map(over.map, over.map_t, over.symmetric, "the gradient of x"),
                                over.symmetric ? over.map_t : over.map, over.volume, data["n_in"].toSymInt(),
                                over.symmetric, over.symmetric && !data["mirror"].toBool());
    return out;
  }
};

class PoolMaxFunction : public torch::autograd::Function<PoolMaxFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Windows& over, const c10::SymInt& n_out,
                               bool largest, bool keep_winner) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->saved_data["kept"] = keep_winner;
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, winner] =
        pool_max_op().call(x, over.map, over.map_t, over.volume, n_out, over.symmetric, largest, keep_winner);
    ctx->mark_non_differentiable({winner});
    ctx->save_for_backward({winner});
    return {y, winner};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(5);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    auto& data = ctx->saved_data;
    TORCH_CHECK(data["kept"].toBool(), "the gradient of x needs what pool_max found: keep_winner=True");
    const Windows over = Windows::load(ctx);
    out[0] = pool_put_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume,
                                data["n_in"].toSymInt(), over.symmetric);
    return out;
  }
};

class PoolPickFunction : public torch::autograd::Function<PoolPickFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& winner, const Windows& over) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->saved_data["n_in"] = x.sym_size(0);
    ctx->save_for_backward({winner});
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_pick_op().call(x, winner, over.map, over.map_t, over.volume, over.symmetric);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(3);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    out[0] = pool_put_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume,
                                ctx->saved_data["n_in"].toSymInt(), over.symmetric);
    return out;
  }
};

class PoolPutFunction : public torch::autograd::Function<PoolPutFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& winner, const Windows& over,
                        const c10::SymInt& n_out) {
    over.save(ctx);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({winner});
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_put_op().call(x, winner, over.map, over.map_t, over.volume, n_out, over.symmetric);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(4);
    if (!grads[0].defined() || !ctx->needs_input_grad(0)) return out;
    const Windows over = Windows::load(ctx);
    out[0] =
        pool_pick_op().call(grads[0], ctx->get_saved_variables()[0], over.map, over.map_t, over.volume, over.symmetric);
    return out;
  }
};

Tensor pool_sum_autograd(const Tensor& x, const OptTensor& in_count, const OptTensor& out_count, TensorList map,
                         TensorList map_t, int64_t kernel_volume, c10::SymInt n_out, bool symmetric, bool mirror) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_sum_op().call(x, in_count, out_count, map, map_t, kernel_volume, std::move(n_out), symmetric, mirror);
  }
  return PoolSumFunction::apply(x, in_count, out_count,
                                Windows{maps_of(map.vec(), map_t.vec()), kernel_volume, symmetric}, n_out, mirror);
}

std::tuple<Tensor, Tensor> pool_max_autograd(const Tensor& x, TensorList map, TensorList map_t, int64_t kernel_volume,
                                             c10::SymInt n_out, bool symmetric, bool largest, bool keep_winner) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_max_op().call(x, map, map_t, kernel_volume, std::move(n_out), symmetric, largest, keep_winner);
  }
  const variable_list both = PoolMaxFunction::apply(
      x, Windows{maps_of(map.vec(), map_t.vec()), kernel_volume, symmetric}, n_out, largest, keep_winner);
  return {both[0], both[1]};
}

Tensor pool_pick_autograd(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t,
                          int64_t kernel_volume, bool symmetric) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_pick_op().call(x, winner, map, map_t, kernel_volume, symmetric);
  }
  return PoolPickFunction::apply(x, winner, Windows{maps_of(map.vec(), map_t.vec()), kernel_volume, symmetric});
}

Tensor pool_put_autograd(const Tensor& x, const Tensor& winner, TensorList map, TensorList map_t, int64_t kernel_volume,
                         c10::SymInt n_out, bool symmetric) {
  if (!needs_node({&x})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pool_put_op().call(x, winner, map, map_t, kernel_volume, std::move(n_out), symmetric);
  }
  return PoolPutFunction::apply(x, winner, Windows{maps_of(map.vec(), map_t.vec()), kernel_volume, symmetric}, n_out);
}

TORCH_LIBRARY_IMPL(voxmma, Autograd, m) {
  m.impl("pool_sum", TORCH_FN(pool_sum_autograd));
  m.impl("pool_max", TORCH_FN(pool_max_autograd));
  m.impl("pool_pick", TORCH_FN(pool_pick_autograd));
  m.impl("pool_put", TORCH_FN(pool_put_autograd));
}

}  // namespace
}  // namespace voxmma
