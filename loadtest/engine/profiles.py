"""Engine profiles from a folder of YAML files, one file a profile."""

from pathlib import Path

from ruamel.yaml import YAML

from extproc.model import Profile
from extproc.policy import ProfileSpec


def read_profile(path: Path) -> Profile:
    """Return the profile in *path*; its name is the file's.

    Raises
    ------
    OSError, ruamel.yaml.YAMLError, pydantic.ValidationError
        The file is missing, not YAML, or not a profile.
    """
    return ProfileSpec.model_validate(YAML(typ="safe").load(path)).profile(path.stem)


def read_profiles(folder: Path) -> dict[str, Profile]:
    """Return every profile of *folder* by name; raises like :func:`read_profile`."""
    return {path.stem: read_profile(path) for path in sorted(folder.glob("*.yaml"))}


def shipped_profiles() -> Path:
    """Return the folder of the profiles that come with TokenFleet, in a checkout or an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    checkout = root / "policies" / "profiles"
    return checkout if checkout.is_dir() else root / "extproc" / "share" / "policies" / "profiles"
