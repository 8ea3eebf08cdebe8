import pytest

from extproc.adapters.openai import classify_path, passes
from tests.adapters.openai.calling import PATHS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tail", ["", "/", "?", "?a=1&b=/v1/models", "/?a"])
def test_a_post_to_an_inference_path_is_a_call_whatever_its_query(path: str, tail: str) -> None:
    call = classify_path("POST", path + tail)
    assert call is not None
    assert call.path == path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "HEAD", "PUT", "DELETE", "post", ""])
def test_another_method_is_no_call(path: str, method: str) -> None:
    assert classify_path(method, path) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "*",
        "/v1/models",
        "/v1/chat/completions2",
        "/v1/chat/completions//",
        "/v1/chat",
        "/V1/chat/completions",
        "/openai/v1/chat/completions",
        "/v1/messages/count_tokens",
        "/v1/responses/resp_1/cancel",
        "?/v1/messages",
        "v1/messages",
        "/completions",
        "/embeddings",
        "/messages",
    ],
)
def test_another_path_is_no_call(path: str) -> None:
    assert classify_path("POST", path) is None


@pytest.mark.parametrize(
    ("path", "api", "task"),
    [
        ("/v1/chat/completions", "openai", "chat"),
        ("/v1/completions", "openai", "completion"),
        ("/v1/embeddings", "openai", "embedding"),
        ("/v1/responses", "openai", "chat"),
        ("/v1/messages", "anthropic", "chat"),
    ],
)
def test_a_path_tells_api_and_task(path: str, api: str, task: str) -> None:
    call = classify_path("POST", path)
    assert call is not None
    assert (call.api, call.task) == (api, task)


@pytest.mark.parametrize(
    ("alias", "path"), [("/chat/completions", "/v1/chat/completions"), ("/responses", "/v1/responses")]
)
@pytest.mark.parametrize("tail", ["", "/", "?a=1"])
def test_a_path_without_its_version_is_the_same_call_where_an_engine_takes_it_for_that(
    alias: str, path: str, tail: str
) -> None:
    assert classify_path("POST", alias + tail) is classify_path("POST", path)
    assert classify_path("GET", alias + tail) is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_safe_method_may_go_home_unchecked(method: str) -> None:
    assert passes(method)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "CONNECT", "TRACE", "get", "post", ""])
def test_any_other_method_may_not(method: str) -> None:
    assert not passes(method)
