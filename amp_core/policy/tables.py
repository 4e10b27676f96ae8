"""The op lists that most accelerators share in torch, and amp-core's own list for every device.

Names follow ATen: one without a namespace belongs to ``aten``, one without an overload means the default
overload. Source: ``ATen/autocast_mode.h`` and ``ATen/autocast_mode.cpp``, torch 2.13.
"""

from __future__ import annotations

from amp_core.common import op_lists
from amp_core.policy import rules as r

Lists = op_lists.Lists

SHARED: Lists = {
    r.LOWER_PRECISION_FP: """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
        mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention
    """,
    r.FP32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
        layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """,
    r.FP32_SET_OPT_DTYPE: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum
        linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """,
    r.FP32_APPEND_DTYPE: "norm.Scalar norm.ScalarOpt_dim",
    r.PROMOTE: """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """,
    r.BANNED: "binary_cross_entropy",
}
"""The rules compiled into torch for most accelerators."""

UNIFORM: Lists = {
    **SHARED,
    r.LOWER_PRECISION_FP: SHARED[r.LOWER_PRECISION_FP]
    + " conv1d.padding conv2d.padding conv3d.padding _addmm_activation _native_multi_head_attention"
    + " _grouped_mm gru.data gru.input lstm.data lstm.input rnn_relu.data rnn_relu.input rnn_tanh.data"
    + " rnn_tanh.input",
    r.FP32: SHARED[r.FP32]
    + """
        batch_norm instance_norm cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
        avg_pool3d polar view_as_complex linalg_matrix_exp linalg_matrix_rank.atol_rtol_tensor
        logcumsumexp quantile quantile.scalar nanquantile nanquantile.scalar
        fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2
        fft_rfftn fft_irfftn fft_hfft fft_ihfft stft stft.center
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
        linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
        linalg_tensorsolve cholesky cholesky_inverse cholesky_solve geqrf inverse orgqr ormqr pinverse
        qr svd triangular_solve lu_solve
    """,
    r.PROMOTE: "",
    r.PROMOTE_TYPES: SHARED[r.PROMOTE].replace("index_put", "").replace("scatter_add", "") + " cat stack",
    r.MATCH_DESTINATION: """
        index_put index_add index_copy scatter.src scatter_add scatter_reduce.two masked_scatter
        index_reduce
    """,
    r.BANNED: "",
    r.FP32_WITH_HINT: "binary_cross_entropy",
}
"""The same treatment on every device: the shared list plus ops that only the CPU runs in float32
and ops without kernels for less.

amp-core's own rules replace those that torch gets wrong: promotion follows `torch.promote_types`, index and
scatter ops match their destination, recurrent layers run in low precision as a whole (their cells alone would
mix dtypes with the float32 state), and a hint replaces the ban."""


WITHOUT_NATIVE: Lists = {r.LOWER_PRECISION_FP: "_grouped_mm"}
"""Rules for ops that torch's autocast ignores; amp-core adds them to the default policy of every device."""


def flatten(lists: Lists) -> dict[str, str]:
    """Map full op names to rules."""
    rules: dict[str, str] = {}
    for rule, names in lists.items():
        for name in names.split():
            overload = "" if "." in name else ".default"
            rules[f"aten::{name}{overload}"] = rule
    return rules
