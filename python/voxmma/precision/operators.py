"""Kinds of operators: what a policy may do to each function and module of torch."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from voxmma.nn.modules.sparse_conv import SparseConv3d


class OpKind(str, Enum):
    """What an operation does to numbers."""

    Compute = "Compute"  # products and sums of products: linear, convolution, attention, matmul
    Reduction = "Reduction"  # sums over many values: norms, softmax, losses, averages
    Elementwise = "Elementwise"  # one output value from one value of each operand
    DataMovement = "DataMovement"  # values are moved or selected, never changed
    Boundary = "Boundary"  # inputs and outputs of the model


# ---------------------------------------------------------------- what kind is it
def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTIONS: dict[OpKind, frozenset[str]] = {
    OpKind.Compute: _names(
        """
        linear bilinear matmul mm bmm addmm baddbmm addbmm addmv mv dot vdot inner outer einsum tensordot kron
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution
        scaled_dot_product_attention multi_head_attention_forward multi_dot chain_matmul lstm gru rnn_tanh
        rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell frozen_linear
        frozen_matmul frozen_convolution frozen_attention"""
    ),
    OpKind.Reduction: _names(
        """sum nansum mean nanmean prod std var std_mean var_mean norm linalg_norm linalg_vector_norm
        linalg_matrix_norm vector_norm logsumexp softmax log_softmax softmin cumsum cumprod logcumsumexp trace
        layer_norm group_norm batch_norm instance_norm rms_norm local_response_norm normalize
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss
        multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss hinge_embedding_loss
        margin_ranking_loss cosine_embedding_loss triplet_margin_loss ctc_loss
        avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d lp_pool2d
        cosine_similarity pairwise_distance cdist dist embedding_bag scatter_add scatter_reduce index_add
        segment_reduce native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _softmax
        _log_softmax nll_loss_forward pool_sum segment_sum"""
    ),
    OpKind.Elementwise: _names(
        """
        add sub mul div true_divide truediv rsub subtract multiply divide neg abs absolute exp exp2 expm1 log
        log2 log10 log1p sqrt rsqrt square reciprocal pow sin cos tan tanh asin acos atan atan2 sinh cosh erf
        erfc sigmoid logsigmoid relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish softplus
        softsign softshrink hardshrink hardtanh hardswish hardsigmoid threshold tanhshrink glu where clamp
        clamp_min clamp_max clip maximum minimum fmax fmin lerp addcmul addcdiv dropout dropout1d dropout2d
        dropout3d alpha_dropout feature_alpha_dropout masked_fill sign floor ceil round trunc frac fmod
        remainder nan_to_num hypot xlogy rtruediv rmul radd"""
    ),
    OpKind.DataMovement: _names(
        """
        reshape view view_as reshape_as permute transpose movedim moveaxis swapaxes swapdims t adjoint
        contiguous clone cat concat concatenate stack hstack vstack split chunk unbind tensor_split getitem
        index index_select gather take take_along_dim masked_select embedding flatten unflatten squeeze
        unsqueeze expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave tile roll flip
        rot90 pad pixel_shuffle pixel_unshuffle channel_shuffle narrow select slice diagonal diag diag_embed
        tril triu unfold max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d amax amin max min topk sort median kthvalue cummax cummin scatter index_put
        meshgrid atleast_1d atleast_2d atleast_3d alias _unsafe_view pool_max pool_pick pool_put"""
    ),
}
_KIND_BY_NAME = {name: kind for kind, names in _FUNCTIONS.items() for name in names}

# Neither compute nor move values into a result of operand precision: metadata, explicit conversion, creation,
# autograd, and comparisons, whose result is no float.
_NEUTRAL = _names(
    """size dim ndimension numel nelement stride storage_offset element_size data_ptr get_device item tolist
    numpy to type type_as float half bfloat16 double int long short char byte bool cpu cuda xpu pin_memory
    detach backward register_hook retain_grad zeros ones empty full arange linspace logspace eye tensor
    as_tensor scalar_tensor from_numpy rand randn randint randperm normal bernoulli multinomial eq ne lt le gt
    ge isnan isinf isfinite isclose allclose equal argmax argmin argsort nonzero any all bincount one_hot
    unique count_nonzero searchsorted bucketize logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_not bitwise_xor and or xor invert floordiv floor_divide get set delete len repr str
    format hash bool int float index contains iter dir deepcopy reduce_ex reduce setstate promote_types
    result_type can_cast record_stream untyped_storage storage getattr setattr is_grad_enabled assert_async
    _assert_async _assert_tensor_metadata zeros_like ones_like empty_like full_like rand_like randn_like
    segment_argmax neighbor_counts"""
)

# Reductions whose PyTorch kernels read 16-bit operands and add up in float32.
_F32_INSIDE = _names(
    """sum mean softmax log_softmax layer_norm group_norm batch_norm instance_norm rms_norm avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d native_layer_norm
    native_group_norm native_batch_norm _native_batch_norm_legit _softmax _log_softmax pool_sum segment_sum"""
)
_F32_INSIDE_MODULES = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.Softmax,
    nn.LogSoftmax,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
# Only the first operand is data; the rest is state kept in float32, which the kernels accept.
_FIRST_ONLY = _names("batch_norm instance_norm native_batch_norm _native_batch_norm_legit")
# Cast what comes out: the same values, without casting the whole table.
_CAST_RESULT = _names("embedding")

_MODULES: tuple[tuple[OpKind, tuple[type[nn.Module], ...]], ...] = (
    (
        OpKind.Compute,
        (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    ),
    (
        OpKind.Reduction,
        (
            nn.LayerNorm,
            nn.GroupNorm,
            nn.modules.batchnorm._NormBase,
            nn.LocalResponseNorm,
            nn.Softmax,
            nn.Softmax2d,
            nn.LogSoftmax,
            nn.Softmin,
            nn.modules.loss._Loss,
            nn.modules.pooling._AvgPoolNd,
            nn.modules.pooling._AdaptiveAvgPoolNd,
            nn.CosineSimilarity,
            nn.PairwiseDistance,
            nn.EmbeddingBag,
        )
        + ((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
    ),
    (
        OpKind.DataMovement,
        (
            nn.Embedding,
            nn.Flatten,
            nn.Unflatten,
            nn.Identity,
            nn.PixelShuffle,
            nn.PixelUnshuffle,
            nn.modules.pooling._MaxPoolNd,
            nn.modules.pooling._AdaptiveMaxPoolNd,
            nn.modules.padding._ConstantPadNd,
            nn.modules.padding._ReflectionPadNd,
            nn.modules.padding._ReplicationPadNd,
        ),
    ),
    (
        OpKind.Elementwise,
        (
            *(
                cls
                for name, cls in vars(nn.modules.activation).items()
                if isinstance(cls, type)
                and issubclass(cls, nn.Module)
                and cls.__module__ == "torch.nn.modules.activation"
                and name not in ("MultiheadAttention", "Softmax", "Softmax2d", "LogSoftmax", "Softmin")
            ),
            nn.modules.dropout._DropoutNd,
        ),
    ),
)


@functools.lru_cache(maxsize=4096)
def _op_name(target: Any) -> str | None:
    """The bare name of a PyTorch function or method ('add' for Tensor.__iadd__), None if it is foreign."""
    if isinstance(target, str):
        name = target
    else:
        owner = (getattr(target, "__module__", None) or "torch").split(".")[0]
        name = str(getattr(target, "_opname", None) or getattr(target, "__name__", ""))
        if not name or owner not in ("torch", "_operator", "operator", "builtins", "math"):
            return None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[0] in "ir" and name[1:] in ("add", "sub", "mul", "div", "truediv", "pow", "matmul"):
            name = name[1:]
    elif target in _INPLACE_OPERATORS:
        name = name[1:]
    return name.rstrip("_") if name != "_" else name


_INPLACE_METHODS = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__imatmul__", "__ipow__"}
)
_INPLACE_OPERATORS = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul}
)


def kind_of(target: Any) -> OpKind | None:
    """The kind of a module, a PyTorch function, an aten operator or a method name; None when it is not known.

    An unknown kind is treated as float32 everywhere (`PrecisionPolicy.precision_for` of None is F32).
    """
    if isinstance(target, nn.Module):
        if isinstance(target, SparseConv3d):
            return OpKind.Compute
        return next((kind for kind, classes in _MODULES if isinstance(target, classes)), None)
    return _KIND_BY_NAME.get(_op_name(target) or "")


@functools.lru_cache(maxsize=1024)
def _inplace_position(func: Any) -> int | None:
    """Where a Python function takes ``inplace`` positionally."""
    if not isinstance(func, types.FunctionType):
        return None
    parameters = list(inspect.signature(func).parameters)
    return parameters.index("inplace") if "inplace" in parameters else None


def _writes_first(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes into its first operand or an ``out``."""
    if kwargs.get("inplace") or kwargs.get("out") is not None or target in _INPLACE_OPERATORS:
        return True
    name = target if isinstance(target, str) else getattr(target, "_opname", getattr(target, "__name__", ""))
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in _INPLACE_METHODS:
        return True
    position = None if isinstance(target, str) else _inplace_position(target)
    return position is not None and position < len(args) and bool(args[position])
