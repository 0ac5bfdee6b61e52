"""Weights as files: what a version looks like on a shared path, written by the trainer and read by rollout nodes.

    DIR/<run id>/version-000012/
        manifest.json        which version, made of what, and a checksum of every tensor (`manifest`)
        expected.json        what engines must hold of it, by their own rules (`manifest`)
        full:   model-00001-of-00003.safetensors … and model.safetensors.index.json (`shards`)
        delta:  delta-00001-of-00003.bin … what changed against the version named in the manifest (`delta`);
                full.json and shards beside it when some reader could not use the delta

A full version is a Hugging Face checkpoint's weights; one shard holds one bucket of the update, byte for byte. A delta
names its base, the version before, so that versions form chains that begin with a full one.

Knows no tier, no torch and no engine: tensors are bytes here. Invariants: a directory with its final name is whole,
because it was written under another name, synced and renamed; nothing in it changes afterwards except `expected.json`,
which is replaced as a whole.
"""
