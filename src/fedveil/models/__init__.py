"""Networks: registry, sizes and builders."""
