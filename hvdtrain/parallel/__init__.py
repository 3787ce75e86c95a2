"""How ranks share a model: data parallelism, pipelines, recovery from too little memory."""
