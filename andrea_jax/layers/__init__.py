"""The parts of a block. Suffixes of names give shapes:

B batch, T time (queries), S time (keys), D d_model, N heads, K key/value heads, H head_dim, F mlp_dim, V vocabulary,
L layers, R rows, E experts.
"""
