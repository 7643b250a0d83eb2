"""Everything that differs between the supported SGLang versions, and what we expect of the surfaces we touch."""
