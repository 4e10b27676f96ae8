"""The op list compiled into torch for mps (``ATen/autocast_mode.cpp``, 2.13).

Names without a namespace are in ``aten``; names without an overload mean the default one. Ops missing from
the installed torch are skipped; tests/policy/test_tables.py checks the list against the dispatcher.
"""

from __future__ import annotations

from amp_core.policy import rules as r
from amp_core.policy.tables import Lists

MPS: Lists = {
    r.LOWER_PRECISION_FP: """
        _convolution _convolution.deprecated _mps_convolution addbmm addmm addmv addr baddbmm bmm
        chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input convolution
        einsum linalg_multi_dot linear lstm_cell matmul mm mv prelu scaled_dot_product_attention
    """,
    r.FP32: """
        acos asin batch_norm binary_cross_entropy_with_logits cdist conv_transpose3d.input cosh
        cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim
        group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 log_softmax.int logsumexp
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss
        nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss
        softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
    """,
    r.PROMOTE: """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot
    """,
}
"""It lacks some ops of other devices and uses float32 where they set the optional dtype."""
