"""OpenAI's Responses API, without the state that it keeps elsewhere: each request brings its whole conversation."""
