"""State machines as pure functions: (state, event) -> state. Nothing here holds a tensor."""
