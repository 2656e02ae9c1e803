"""A kind of data of its own: folders of NumPy arrays, <set>/<class>/<tile>.npy, one file for each group of verbs."""

from trainkit.data import kinds

TABLES = {"data": {"tiles": "tiles.dataset:Tiles"}}

kinds.add(
    kinds.Kind(
        name="tiles",
        open="tiles.dataset:Tiles",
        holds="tiles.dataset:holds",
        verify="tiles.dataset:verify",
        configure="tiles.configure:configure",
        predict="tiles.predict:predict",
        export="tiles.export:exporter",
        sample="tile",
    )
)
