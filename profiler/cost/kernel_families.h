// Kinds of kernels that have coefficients of their own: OOMDIAG_FAMILY(name, form). Their times for products, memory and turns are added
// up (sum) or hidden behind the longest (longest). Included where a list of them is needed.

OOMDIAG_FAMILY(matrix_product, longest)
OOMDIAG_FAMILY(hopper_product, longest)       // in half precision: cuBLAS has kernels for Hopper's tensor cores,
OOMDIAG_FAMILY(hopper_even_product, longest)  // which rows that are no multiple of 8 elements do not reach
OOMDIAG_FAMILY(hopper_odd_product, longest)
OOMDIAG_FAMILY(fp32_product, longest)
OOMDIAG_FAMILY(convolution, sum)  // cuDNN brings tensors into another layout around the kernel that computes
OOMDIAG_FAMILY(convolution_backward, sum)
OOMDIAG_FAMILY(hopper_tf32_convolution, sum)
OOMDIAG_FAMILY(hopper_tf32_convolution_backward, sum)
OOMDIAG_FAMILY(hopper_half_convolution, sum)
OOMDIAG_FAMILY(hopper_half_convolution_backward, sum)
OOMDIAG_FAMILY(hopper_tf32_pointwise, sum)  // a window of 1 is a product of matrices as they lie
OOMDIAG_FAMILY(hopper_tf32_pointwise_backward, sum)
OOMDIAG_FAMILY(hopper_half_pointwise, sum)
OOMDIAG_FAMILY(hopper_half_pointwise_backward, sum)
OOMDIAG_FAMILY(grouped_convolution, sum)
OOMDIAG_FAMILY(grouped_convolution_backward, sum)
OOMDIAG_FAMILY(hopper_grouped_convolution, sum)
OOMDIAG_FAMILY(hopper_grouped_convolution_backward, sum)
OOMDIAG_FAMILY(depthwise_convolution, sum)  // cuDNN's, in float16
OOMDIAG_FAMILY(depthwise_convolution_backward, sum)
OOMDIAG_FAMILY(half_channels_last_depthwise, sum)  // cuDNN's, which has no other kernels for channels_last
OOMDIAG_FAMILY(half_channels_last_depthwise_backward, sum)
OOMDIAG_FAMILY(fp32_channels_last_depthwise, sum)
OOMDIAG_FAMILY(fp32_channels_last_depthwise_backward, sum)
OOMDIAG_FAMILY(own_depthwise_convolution, sum)  // PyTorch's own kernels
OOMDIAG_FAMILY(own_depthwise_convolution_backward, sum)
OOMDIAG_FAMILY(attention, longest)
OOMDIAG_FAMILY(attention_backward, longest)
OOMDIAG_FAMILY(hopper_attention, longest)
OOMDIAG_FAMILY(hopper_attention_backward, longest)
OOMDIAG_FAMILY(fp32_attention, longest)  // the memory-efficient kernel, without tensor cores
OOMDIAG_FAMILY(fp32_attention_backward, longest)
OOMDIAG_FAMILY(rnn, longest)
OOMDIAG_FAMILY(rnn_backward, longest)
OOMDIAG_FAMILY(elementwise, longest)
OOMDIAG_FAMILY(mixed_elementwise, longest)  // shapes or dtypes differ
OOMDIAG_FAMILY(strided_elementwise, longest)
OOMDIAG_FAMILY(copy, longest)
OOMDIAG_FAMILY(mixed_copy, longest)
OOMDIAG_FAMILY(strided_copy, longest)
OOMDIAG_FAMILY(batch_norm, longest)  // PyTorch's own
OOMDIAG_FAMILY(batch_norm_backward, longest)
OOMDIAG_FAMILY(cudnn_batch_norm, longest)
OOMDIAG_FAMILY(cudnn_batch_norm_backward, longest)
OOMDIAG_FAMILY(layer_norm, sum)
OOMDIAG_FAMILY(layer_norm_backward, sum)
OOMDIAG_FAMILY(tall_layer_norm_backward, sum)  // more than 65536 rows are summed in parts
OOMDIAG_FAMILY(normalization, longest)
OOMDIAG_FAMILY(normalization_backward, longest)
OOMDIAG_FAMILY(softmax, longest)
OOMDIAG_FAMILY(softmax_backward, longest)
OOMDIAG_FAMILY(reduction, sum)
OOMDIAG_FAMILY(pooling, longest)
OOMDIAG_FAMILY(pooling_backward, longest)
OOMDIAG_FAMILY(interpolation, sum)
OOMDIAG_FAMILY(interpolation_backward, longest)
OOMDIAG_FAMILY(indexing, longest)
OOMDIAG_FAMILY(indexing_backward, longest)  // of bags of embeddings
OOMDIAG_FAMILY(embedding_gradient, sum)     // sorts the indices, fills the table with zeros, and adds
OOMDIAG_FAMILY(label_loss, sum)
OOMDIAG_FAMILY(scattering, longest)  // adds or writes where an index says
OOMDIAG_FAMILY(factorization, longest)
OOMDIAG_FAMILY(optimizer, longest)
OOMDIAG_FAMILY(fused, longest)  // kernels that no operator launches: of torch.compile, Triton, CuPy
OOMDIAG_FAMILY(other, longest)
