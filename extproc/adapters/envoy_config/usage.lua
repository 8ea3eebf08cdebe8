-- Reads token counts from the end of an answer, streamed or whole, and leaves them in dynamic metadata.
-- Nothing is buffered: chunks pass as they come, only the tail (and the head, where Anthropic counts the prompt) is kept.
local TAIL = 8192   -- bytes kept of one chunk; an event of the Responses API ends with its usage
local SMALL = 1024  -- chunks smaller than this are joined, so that two kept pieces always hold the last event

local function number(text, key)
  return tonumber(string.match(text, '"' .. key .. '"%s*:%s*(%d+)'))
end

local function usage(text)
  -- The last one counts: a stream may carry a running total, and tool arguments may contain anything earlier.
  -- Without the anchor a text that holds none would be searched from each of its bytes: seconds of Envoy's thread.
  return string.match(text, '^.*"usage"%s*:%s*(%b{})') or ""
end

function envoy_on_response(response)
  local kind = response:headers():get("content-type") or ""
  if not (string.find(kind, "json", 1, true) or string.find(kind, "event-stream", 1, true)) then
    return
  end
  local head, before, last = nil, "", ""
  for chunk in response:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      local kept = math.min(length, TAIL)
      if #last >= SMALL then
        before, last = last, ""
      end
      last = last .. chunk:getBytes(length - kept, kept)
      head = head or chunk:getBytes(0, kept)
    end
  end
  local tail = before .. last
  local found = usage(tail)
  local prompt = number(found, "prompt_tokens") or number(found, "input_tokens")
  local completion = number(found, "completion_tokens") or number(found, "output_tokens")
  local first = prompt and found or usage(head or "")
  prompt = prompt or number(first, "input_tokens")
  local cached = number(first, "cached_tokens")
  local read = number(first, "cache_read_input_tokens")
  if read then
    -- Anthropic counts cached tokens beside input_tokens, the others within.
    cached = read
    prompt = (prompt or 0) + read + (number(first, "cache_creation_input_tokens") or 0)
  end
  local metadata = response:streamInfo():dynamicMetadata()
  for key, value in pairs({ prompt_tokens = prompt, completion_tokens = completion, cached_tokens = cached }) do
    metadata:set("tokenfleet.usage", key, value)
  end
  -- vLLM ends a stream whose engine died with an error event under status 200.
  if string.find(tail, 'data:%s*{"error"') or string.find(tail, 'event:%s*error') then
    metadata:set("tokenfleet.usage", "stream_error", true)
  end
end
